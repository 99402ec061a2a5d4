// Raising the errors that the worker reports, as the same types that local torch raises.
#pragma once

#include <cstdint>
#include <string>

#include "wire/message.h"

namespace shoal::client {

[[noreturn]] void raiseError(wire::ErrorKind kind, const std::string& text);
// shoal.DeviceLostError. The bindings install how it is thrown, for only they know Python.
[[noreturn]] void raiseDeviceLost(const std::string& text);

// Where in the user's program we are; installed by the bindings.
struct LineHooks {
  uint64_t (*current)() = nullptr;              // a token for the running line; 0: unknown
  std::string (*describe)(uint64_t) = nullptr;  // "train.py:12 in step"
  void (*device_lost)(const std::string&) = nullptr;
};
LineHooks& lineHooks();

}  // namespace shoal::client
