#include "client/member/errors.h"

#include <c10/util/Exception.h>

namespace shoal::client {

LineHooks& lineHooks() {
  static LineHooks hooks;
  return hooks;
}

void raiseError(wire::ErrorKind kind, const std::string& text, const ErrorData& data) {
  using wire::ErrorKind;
  if (kind == ErrorKind::kShareRefused || kind == ErrorKind::kShareRevoked) {
    raiseShareError(text, kind == ErrorKind::kShareRevoked);
  }
  if (lineHooks().operator_error != nullptr) lineHooks().operator_error(kind, text, data);
  TORCH_CHECK(false, text);
  __builtin_unreachable();
}

void raiseDeviceLost(const std::string& text, const std::string& device) {
  if (lineHooks().device_lost != nullptr) lineHooks().device_lost(text, device);
  TORCH_CHECK(false, text);
  __builtin_unreachable();
}

std::string LostDevice::text(const std::string& why) const {
  return "shoal device " + name + " was lost: " + why +
         ". Call shoal.connect() for a new lease; tensors of the old one are gone.";
}

void raiseDeviceLost(const LostDevice& lost) {
  if (lineHooks().lost != nullptr) lineHooks().lost(lost);
  raiseDeviceLost(lost.text(lost.reason), lost.name);
}

void raiseShareError(const std::string& text, bool revoked) {
  if (lineHooks().share_error != nullptr) lineHooks().share_error(text, revoked);
  TORCH_CHECK(false, text);
  __builtin_unreachable();
}

}  // namespace shoal::client
