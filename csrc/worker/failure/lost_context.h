// Whether an error is a call's own or has ended the accelerator's context. After an illegal access
// or a device assert every later call of the process fails: only a new process helps.
#pragma once

#include <c10/core/Device.h>

#include <exception>
#include <string>

namespace shoal::worker {

// The device's own text if its context is lost, and "" otherwise. `in_operator`: the error comes
// from an operator, which may fail alone; an error in Shoal's own work with the device is final.
std::string lostContext(const std::exception_ptr& error, c10::Device device, bool in_operator);

// Without torch's advice to compile torch anew, or to look for the error on the web.
std::string withoutAdvice(const std::string& text);

}  // namespace shoal::worker
