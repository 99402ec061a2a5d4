#include "client/member/errors.h"

#include <c10/util/Exception.h>

namespace shoal::client {

LineHooks& lineHooks() {
  static LineHooks hooks;
  return hooks;
}

void raiseError(wire::ErrorKind kind, const std::string& text) {
  using wire::ErrorKind;
  switch (kind) {
    case ErrorKind::kIndex:
      TORCH_CHECK_INDEX(false, text);
    case ErrorKind::kValue:
      TORCH_CHECK_VALUE(false, text);
    case ErrorKind::kType:
      TORCH_CHECK_TYPE(false, text);
    case ErrorKind::kNotImplemented:
      TORCH_CHECK_NOT_IMPLEMENTED(false, text);
    case ErrorKind::kOutOfMemory:
      TORCH_CHECK_WITH(OutOfMemoryError, false, text);
    case ErrorKind::kLinAlg:
      TORCH_CHECK_LINALG(false, text);
    case ErrorKind::kPeerLost:
      raiseDeviceLost(text, Lost::kPeer);
    case ErrorKind::kShareRefused:
    case ErrorKind::kShareRevoked:
      raiseShareError(text, kind == ErrorKind::kShareRevoked);
    default:
      TORCH_CHECK(false, text);
  }
  __builtin_unreachable();
}

void raiseDeviceLost(const std::string& text, Lost lost) {
  if (lineHooks().device_lost != nullptr) lineHooks().device_lost(text, lost);
  TORCH_CHECK(false, text);
  __builtin_unreachable();
}

std::string LostDevice::text(const std::string& why) const {
  return "shoal device " + name + " was lost: " + why +
         ". Call shoal.connect() for a new lease; tensors of the old one are gone.";
}

void raiseDeviceLost(const LostDevice& lost) {
  if (lineHooks().lost != nullptr) lineHooks().lost(lost);
  raiseDeviceLost(lost.text(lost.reason));
}

void raiseShareError(const std::string& text, bool revoked) {
  if (lineHooks().share_error != nullptr) lineHooks().share_error(text, revoked);
  TORCH_CHECK(false, text);
  __builtin_unreachable();
}

}  // namespace shoal::client
