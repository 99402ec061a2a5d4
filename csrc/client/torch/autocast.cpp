// Autocast: the same lists of operators as for other accelerators.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "client/torch/kernels.h"

// torch's macros name ATen's types without their namespace.
namespace at {
namespace {

void registerLists(torch::Library& m) {
#define SHOAL_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(SHOAL_LOWER_PRECISION)
#undef SHOAL_LOWER_PRECISION
#define SHOAL_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(SHOAL_FP32)
#undef SHOAL_FP32
#define SHOAL_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(SHOAL_FP32_SET_OPT_DTYPE)
#undef SHOAL_FP32_SET_OPT_DTYPE
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define SHOAL_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(SHOAL_PROMOTE)
#undef SHOAL_PROMOTE
}

}  // namespace
}  // namespace at

namespace shoal::client {

void registerAutocast() {
  constexpr auto key = c10::DispatchKey::AutocastPrivateUse1;
  auto* others = new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFallthrough());
  at::registerLists(*new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
}

}  // namespace shoal::client
