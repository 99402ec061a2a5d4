// Raising the errors that the worker reports, as the same types that local torch raises.
#pragma once

#include <cstdint>
#include <string>

#include "wire/message.h"

namespace shoal::client {

[[noreturn]] void raiseError(wire::ErrorKind kind, const std::string& text);
// shoal.DeviceLostError, or its PeerLostError where the device itself is well and another one is
// gone. The bindings install how they are thrown, for only they know Python.
enum class Lost { kDevice, kPeer };
[[noreturn]] void raiseDeviceLost(const std::string& text, Lost lost = Lost::kDevice);
// shoal.ShareError, or its ShareRevokedError.
[[noreturn]] void raiseShareError(const std::string& text, bool revoked = false);

// Where in the user's program we are; installed by the bindings.
struct LineHooks {
  uint64_t (*current)() = nullptr;              // a token for the running line; 0: unknown
  std::string (*describe)(uint64_t) = nullptr;  // "train.py:12 in step"
  void (*device_lost)(const std::string&, Lost) = nullptr;
  void (*share_error)(const std::string&, bool revoked) = nullptr;
};
LineHooks& lineHooks();

}  // namespace shoal::client
