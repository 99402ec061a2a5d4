// What a program sets in torch and what decides results at its workers: most of torch's global
// `Context`, and the default dtype. The defaults here are those with which a worker starts.
#pragma once

#include <array>
#include <cstdint>

#include "wire/codec.h"

namespace shoal::wire {

// What is on or off: bits of Settings::flags.
enum class Setting : uint8_t {
  kCudnn,
  kCudnnBenchmark,
  kCudnnDeterministic,
  kMkldnn,
  kMkldnnDeterministic,
  kNnpack,
  kDeterministic,          // torch.use_deterministic_algorithms
  kDeterministicWarnOnly,  // … warns only
  kFillUninitialized,      // … fills the results of torch.empty
  kFlashAttention,
  kFlashAttention3,
  kEfficientAttention,
  kMathAttention,
  kCudnnAttention,
  kOverrideableAttention,
  kMathAttentionReduced,  // the math kernel may sum in float16 and bfloat16
  kFp16Accumulation,      // of cuBLAS
  kFp16ReductionCpu,
  kFlushDenormal,
  kEnd,
};
constexpr uint64_t bitOf(Setting setting) {
  return uint64_t{1} << static_cast<unsigned>(setting);
}
inline constexpr uint64_t kSettingsDefault =
    bitOf(Setting::kCudnn) | bitOf(Setting::kMkldnn) | bitOf(Setting::kNnpack) |
    bitOf(Setting::kFillUninitialized) | bitOf(Setting::kFlashAttention) |
    bitOf(Setting::kEfficientAttention) | bitOf(Setting::kMathAttention) |
    bitOf(Setting::kCudnnAttention) | bitOf(Setting::kOverrideableAttention);

// Where float32 may be computed with less precision, in the order of Settings::precisions.
enum class PrecisionOf : uint8_t {
  kCudaConv,
  kCudaRnn,
  kCudaMatmul,
  kMkldnnConv,
  kMkldnnRnn,
  kMkldnnMatmul,
  kOthers,
  kEnd,
};
// Values of at::Float32Precision.
enum class Precision : uint8_t { kNone, kIeee, kTf32, kBf16, kLast = kBf16 };

// From this message on, the worker's torch is set like this.
struct Settings {
  static constexpr Kind kKind = Kind::kSettings;
  static constexpr size_t kAttentionKernels = 5;
  uint8_t default_dtype = 6;  // at::ScalarType
  uint64_t flags = kSettingsDefault;
  std::array<Precision, static_cast<size_t>(PrecisionOf::kEnd)> precisions{Precision::kTf32,
                                                                           Precision::kTf32};
  std::array<uint8_t, kAttentionKernels> attention_order{1, 2, 0, 3, 4};  // at::SDPBackend
  uint32_t cudnn_benchmark_limit = 10;
  uint8_t cudnn_depthwise = 0;                     // at::CuDNNDepthwiseKernel
  uint8_t fp16_reduction = 0, bf16_reduction = 0;  // at::CuBLASReductionOption
  uint8_t linalg = 0;                              // at::LinalgBackend
  uint8_t blas = 0;                                // at::BlasBackend
  uint8_t rocm_attention = 0;                      // at::ROCmFABackend

  bool operator==(const Settings&) const = default;
  bool has(Setting setting) const { return (flags & bitOf(setting)) != 0; }
  Precision precision(PrecisionOf of) const { return precisions[static_cast<size_t>(of)]; }

  void layout(auto& codec) {
    codec.word("default_dtype", default_dtype, UINT8_MAX);
    codec.word("flags", flags, bitOf(Setting::kEnd) - 1);
    for (auto& precision : precisions) {
      codec.word("precision", precision, static_cast<uint64_t>(Precision::kLast));
    }
    for (auto& kernel : attention_order) codec.word("attention", kernel, kAttentionKernels - 1);
    codec.word("cudnn_benchmark_limit", cudnn_benchmark_limit, INT32_MAX);
    codec.word("cudnn_depthwise", cudnn_depthwise, 2);
    codec.word("fp16_reduction", fp16_reduction, 2);
    codec.word("bf16_reduction", bf16_reduction, 2);
    codec.word("linalg", linalg, 2);
    codec.word("blas", blas, 3);
    codec.word("rocm_attention", rocm_attention, 2);
  }
};

}  // namespace shoal::wire
