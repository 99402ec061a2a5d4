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
// What the client itself saw of a device that it lost. The pool may know more.
enum class Seen : int {
  kClosed = 0,  // the worker, or its machine, closed the connection
  kSilent = 1,  // nothing came over the network any more
  kHung = 2,    // the worker on this machine shows no sign of life
  kBroken = 3,  // the worker said something that makes no sense, or goodbye; the reason has it
};
struct LostDevice {
  uint32_t session, member;
  Seen seen;
  std::string name, reason;
  std::string text(const std::string& why) const;
};
// shoal.DeviceLostError. Its text gets the pool's reason when it becomes a Python error: no lock is
// held then, so the program may wait for it.
[[noreturn]] void raiseDeviceLost(const LostDevice& lost);
// shoal.ShareError, or its ShareRevokedError.
[[noreturn]] void raiseShareError(const std::string& text, bool revoked = false);

// Where in the user's program we are; installed by the bindings.
struct LineHooks {
  uint64_t (*current)() = nullptr;              // a token for the running line; 0: unknown
  std::string (*describe)(uint64_t) = nullptr;  // "train.py:12 in step"
  void (*device_lost)(const std::string&, Lost) = nullptr;
  void (*share_error)(const std::string&, bool revoked) = nullptr;
  void (*lost)(const LostDevice&) = nullptr;
};
LineHooks& lineHooks();

}  // namespace shoal::client
