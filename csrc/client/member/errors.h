// Raises the errors that the worker reports, as the same types that local torch raises. The
// bindings install the functions that throw them, for only they know Python.
#pragma once

#include <cstdint>
#include <string>

#include "wire/message.h"

namespace shoal::client {

// What an error of a device carries beside its text; unknown parts are empty.
struct ErrorData {
  std::string device;         // the name of the device on which it happened
  std::string operator_name;  // as in "aten::add"
  std::string line;           // of the user's program, as in "train.py:12 in step"
  std::string peer;           // of kPeerLost: the name of the lost device
};
// Takes the GIL, so the caller must not hold the session's lock.
[[noreturn]] void raiseError(wire::ErrorKind kind, const std::string& text, const ErrorData& data);
// Raises shoal.DeviceLostError. May run with the lock held.
[[noreturn]] void raiseDeviceLost(const std::string& text, const std::string& device);
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
  void (*operator_error)(wire::ErrorKind, const std::string&, const ErrorData&) = nullptr;
  void (*device_lost)(const std::string& text, const std::string& device) = nullptr;
  void (*share_error)(const std::string&, bool revoked) = nullptr;
  void (*lost)(const LostDevice&) = nullptr;
};
LineHooks& lineHooks();

}  // namespace shoal::client
