#include "client/settings/program_settings.h"

#include <c10/core/DefaultDtype.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <utility>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace shoal::client {
namespace {

using at::Context;
using wire::bitOf;
using wire::Setting;

constexpr std::pair<Setting, bool (Context::*)() const> kFlags[] = {
    {Setting::kCudnn, &Context::userEnabledCuDNN},
    {Setting::kCudnnBenchmark, &Context::benchmarkCuDNN},
    {Setting::kCudnnDeterministic, &Context::deterministicCuDNN},
    {Setting::kMkldnn, &Context::userEnabledMkldnn},
    {Setting::kMkldnnDeterministic, &Context::deterministicMkldnn},
    {Setting::kNnpack, &Context::userEnabledNNPACK},
    {Setting::kDeterministic, &Context::deterministicAlgorithms},
    {Setting::kDeterministicWarnOnly, &Context::deterministicAlgorithmsWarnOnly},
    {Setting::kFillUninitialized, &Context::deterministicFillUninitializedMemory},
    {Setting::kFlashAttention, &Context::userEnabledFlashSDP},
    {Setting::kFlashAttention3, &Context::userEnabledFA3SDP},
    {Setting::kEfficientAttention, &Context::userEnabledMemEfficientSDP},
    {Setting::kMathAttention, &Context::userEnabledMathSDP},
    {Setting::kCudnnAttention, &Context::userEnabledCuDNNSDP},
    {Setting::kOverrideableAttention, &Context::userEnabledOverrideableSDP},
    {Setting::kMathAttentionReduced, &Context::allowFP16BF16ReductionMathSDP},
    {Setting::kFp16Accumulation, &Context::allowFP16AccumulationCuBLAS},
    {Setting::kFp16ReductionCpu, &Context::allowFP16ReductionCPU},
};
static_assert(std::size(kFlags) + 1 == static_cast<size_t>(Setting::kEnd));  // and kFlushDenormal

// torch.set_flush_denormal is a mode of the processor, for one thread.
bool flushesDenormal() {
#if defined(__SSE2__)
  return (_mm_getcsr() & 0x8000) != 0;
#elif defined(__aarch64__)
  uint64_t control;
  __asm__ volatile("mrs %0, fpcr" : "=r"(control));
  return (control & (uint64_t{1} << 24)) != 0;
#else
  return false;
#endif
}

using Backend = at::Float32Backend;
using Op = at::Float32Op;

wire::Precision read(Backend backend, Op op) {
  return static_cast<wire::Precision>(at::globalContext().float32Precision(backend, op));
}

// In the order of wire::PrecisionOf.
decltype(wire::Settings::precisions) readPrecisions() {
  return {read(Backend::CUDA, Op::CONV),   read(Backend::CUDA, Op::RNN),
          read(Backend::CUDA, Op::MATMUL), read(Backend::MKLDNN, Op::CONV),
          read(Backend::MKLDNN, Op::RNN),  read(Backend::MKLDNN, Op::MATMUL),
          read(Backend::GENERIC, Op::ALL)};
}

}  // namespace

wire::Settings programSettings() {
  Context& context = at::globalContext();
  wire::Settings now;
  now.default_dtype = static_cast<uint8_t>(c10::get_default_dtype_as_scalartype());
  now.flags = flushesDenormal() ? bitOf(Setting::kFlushDenormal) : 0;
  for (const auto& [setting, isOn] : kFlags) {
    if ((context.*isOn)()) now.flags |= bitOf(setting);
  }
  now.precisions = readPrecisions();
  const auto order = context.sDPPriorityOrder();
  static_assert(std::tuple_size_v<decltype(order)> == wire::Settings::kAttentionKernels);
  for (size_t i = 0; i < order.size(); ++i) {
    now.attention_order[i] = static_cast<uint8_t>(order[i]);
  }
  now.cudnn_benchmark_limit = static_cast<uint32_t>(std::max(0, context.benchmarkLimitCuDNN()));
  now.cudnn_depthwise = static_cast<uint8_t>(context.cudnnDepthwiseKernel());
  now.fp16_reduction = static_cast<uint8_t>(context.allowFP16ReductionCuBLAS());
  now.bf16_reduction = static_cast<uint8_t>(context.allowBF16ReductionCuBLAS());
  now.linalg = static_cast<uint8_t>(context.linalgPreferredBackend());
  // Torch gives cuBLAS where nothing was chosen. The worker's torch has a default of its own.
  const auto blas = context.blasPreferredBackend();
  now.blas =
      static_cast<uint8_t>(blas == at::BlasBackend::Cublas ? at::BlasBackend::Default : blas);
  now.rocm_attention = static_cast<uint8_t>(context.getROCmFAPreferredBackend());
  return now;
}

bool ProgramSettings::seenPrecisions() const {
  if (!of_cpu_) return readPrecisions() == seen_precisions_;
  using enum wire::PrecisionOf;
  const auto seen = [this](Op op, wire::PrecisionOf of) {
    return read(Backend::MKLDNN, op) == seen_precisions_[static_cast<size_t>(of)];
  };
  // Torch's answer for MKLDNN includes what is set for all.
  return seen(Op::CONV, kMkldnnConv) && seen(Op::RNN, kMkldnnRnn) &&
         seen(Op::MATMUL, kMkldnnMatmul);
}

bool ProgramSettings::changed(bool precisions) {
  // The flags lie in the object itself. Reading them one by one takes 60 ns, comparing its bytes
  // 14. The precisions of float32 lie elsewhere.
  const void* bytes = &at::globalContext();
  const auto dtype = c10::get_default_dtype_as_scalartype();
  const bool flush = flushesDenormal();
  if (std::memcmp(bytes, seen_.data(), seen_.size()) == 0 && dtype == seen_dtype_ &&
      flush == seen_flush_ && (!precisions || seenPrecisions())) {
    return false;
  }
  wire::Settings now = programSettings();
  if (torch::autograd::get_current_graph_task_id() != -1) {
    // A backward pass runs in torch's thread for the device. Local torch would run it in the
    // program's thread, in its mode.
    now.flags &= ~bitOf(Setting::kFlushDenormal);
    now.flags |= told_.flags & bitOf(Setting::kFlushDenormal);
  }
  std::memcpy(seen_.data(), bytes, seen_.size());
  seen_precisions_ = now.precisions;
  seen_dtype_ = dtype;
  seen_flush_ = flush;
  return std::exchange(told_, now) != now;
}

}  // namespace shoal::client
