#include "worker/calls/settings.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>

#include <set>
#include <utility>

namespace shoal::worker {
namespace {

using at::Context;
using wire::PrecisionOf;
using wire::Setting;

constexpr std::pair<Setting, void (Context::*)(bool)> kFlags[] = {
    {Setting::kCudnn, &Context::setUserEnabledCuDNN},
    {Setting::kCudnnBenchmark, &Context::setBenchmarkCuDNN},
    {Setting::kCudnnDeterministic, &Context::setDeterministicCuDNN},
    {Setting::kMkldnn, &Context::setUserEnabledMkldnn},
    {Setting::kMkldnnDeterministic, &Context::setDeterministicMkldnn},
    {Setting::kNnpack, &Context::setUserEnabledNNPACK},
    {Setting::kFillUninitialized, &Context::setDeterministicFillUninitializedMemory},
    {Setting::kFlashAttention, &Context::setSDPUseFlash},
    {Setting::kFlashAttention3, &Context::setSDPUseFA3},
    {Setting::kEfficientAttention, &Context::setSDPUseMemEfficient},
    {Setting::kMathAttention, &Context::setSDPUseMath},
    {Setting::kCudnnAttention, &Context::setSDPUseCuDNN},
    {Setting::kOverrideableAttention, &Context::setSDPUseOverrideable},
    {Setting::kMathAttentionReduced, &Context::setAllowFP16BF16ReductionMathSDP},
    {Setting::kFp16Accumulation, &Context::setAllowFP16AccumulationCuBLAS},
};

void applyPrecisions(const wire::Settings& settings, Context& context) {
  using Backend = at::Float32Backend;
  using Op = at::Float32Op;
  using wire::Precision;
  // Torch keeps two accounts of these and refuses to answer where they differ: first the older one.
  const bool fast = settings.precision(PrecisionOf::kCudaMatmul) == Precision::kTf32;
  const bool faster = settings.precision(PrecisionOf::kMkldnnMatmul) == Precision::kBf16;
  context.setFloat32MatmulPrecision(faster ? "medium" : fast ? "high" : "highest");
  const auto set = [&](Backend backend, Op op, PrecisionOf of) {
    context.setFloat32Precision(backend, op,
                                static_cast<at::Float32Precision>(settings.precision(of)));
  };
  set(Backend::CUDA, Op::CONV, PrecisionOf::kCudaConv);
  set(Backend::CUDA, Op::RNN, PrecisionOf::kCudaRnn);
  set(Backend::CUDA, Op::MATMUL, PrecisionOf::kCudaMatmul);
  set(Backend::MKLDNN, Op::CONV, PrecisionOf::kMkldnnConv);
  set(Backend::MKLDNN, Op::RNN, PrecisionOf::kMkldnnRnn);
  set(Backend::MKLDNN, Op::MATMUL, PrecisionOf::kMkldnnMatmul);
  set(Backend::GENERIC, Op::ALL, PrecisionOf::kOthers);
}

// Libraries that only some builds of torch have. Setting one that is missing is an error in torch.
void applyLibraries(const wire::Settings& settings, Context& context) {
  const auto linalg = static_cast<at::LinalgBackend>(settings.linalg);
  const bool has_linalg =
      linalg == at::LinalgBackend::Default ||
      (linalg == at::LinalgBackend::Magma ? context.hasMAGMA() : context.hasCuSOLVER());
  if (has_linalg && linalg != context.linalgPreferredBackend()) {
    context.setLinalgPreferredBackend(linalg);
  }
  const auto blas = static_cast<at::BlasBackend>(settings.blas);
  const bool has_blas = blas == at::BlasBackend::Cublaslt ? context.hasCuBLASLt()
                        : blas == at::BlasBackend::Ck     ? context.hasCKGEMM()
                                                          : true;
  const auto before = context.blasPreferredBackend();
  const bool has_default = blas == at::BlasBackend::Default && before == at::BlasBackend::Cublas;
  if (has_blas && blas != before && !has_default) context.setBlasPreferredBackend(blas);
  const auto rocm = static_cast<at::ROCmFABackend>(settings.rocm_attention);
  const bool has_rocm = rocm != at::ROCmFABackend::Ck || context.hasCKSDPA();
  if (has_rocm && rocm != context.getROCmFAPreferredBackend()) {
    context.setROCmFAPreferredBackend(rocm);
  }
  try {
    context.setAllowFP16ReductionCPU(settings.has(Setting::kFp16ReductionCpu));
  } catch (const c10::Error&) {
    // This processor has no such sums.
  }
}

}  // namespace

void applySettings(const wire::Settings& settings) {
  const auto dtype = static_cast<c10::ScalarType>(settings.default_dtype);
  if (dtype != at::kFloat && dtype != at::kDouble && dtype != at::kHalf && dtype != at::kBFloat16) {
    throw wire::ProtocolError("the default dtype is not one of floating point");
  }
  const std::set<int64_t> kernels(settings.attention_order.begin(), settings.attention_order.end());
  if (kernels.size() != settings.attention_order.size()) {
    throw wire::ProtocolError("the order of attention kernels names one twice");
  }
  Context& context = at::globalContext();
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
  for (const auto& [setting, set] : kFlags) (context.*set)(settings.has(setting));
  context.setDeterministicAlgorithms(settings.has(Setting::kDeterministic),
                                     settings.has(Setting::kDeterministicWarnOnly));
  Context::setFlushDenormal(settings.has(Setting::kFlushDenormal));
  applyPrecisions(settings, context);
  context.setSDPPriorityOrder({settings.attention_order.begin(), settings.attention_order.end()});
  context.setBenchmarkLimitCuDNN(static_cast<int>(settings.cudnn_benchmark_limit));
  context.setCuDNNDepthwiseKernel(static_cast<at::CuDNNDepthwiseKernel>(settings.cudnn_depthwise));
  const auto reduce = [](uint8_t option, auto&& set) {
    const auto value = static_cast<at::CuBLASReductionOption>(option);
    set(value == at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK,
        value != at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK);
  };
  reduce(settings.fp16_reduction,
         [&](bool reduced, bool split) { context.setAllowFP16ReductionCuBLAS(reduced, split); });
  reduce(settings.bf16_reduction,
         [&](bool reduced, bool split) { context.setAllowBF16ReductionCuBLAS(reduced, split); });
  applyLibraries(settings, context);
}

}  // namespace shoal::worker
