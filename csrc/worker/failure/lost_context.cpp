#include "worker/failure/lost_context.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <sstream>

namespace shoal::worker {
namespace {

// A lost context gives its error again to whoever asks it anything.
std::string askedAgain(c10::Device device) {
  try {
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.queryStream(guard.getStream(device));
  } catch (const c10::Error& error) {
    return withoutAdvice(error.what_without_backtrace());
  }
  return "";
}

}  // namespace

std::string withoutAdvice(const std::string& text) {
  static constexpr const char* kAdvice[] = {"CUDA kernel errors might", "For debugging consider",
                                            "Compile with `TORCH_USE", "Search for `cuda"};
  std::istringstream lines(text);
  std::string kept;
  for (std::string line; std::getline(lines, line);) {
    bool advice = line.empty();
    for (const char* start : kAdvice) advice = advice || line.rfind(start, 0) == 0;
    if (!advice) kept += (kept.empty() ? "" : "; ") + line;
  }
  return kept;
}

std::string lostContext(const std::exception_ptr& error, c10::Device device, bool in_operator) {
  if (device.is_cpu()) return "";
  try {
    std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError&) {
    return "";  // torch's allocator has tried everything, and the device goes on
  } catch (const c10::AcceleratorError& failed) {
    const std::string again = askedAgain(device);
    if (!again.empty() || in_operator) return again;
    return withoutAdvice(failed.what_without_backtrace());
  } catch (const c10::Error&) {
    return askedAgain(device);  // the libraries on top of the driver have errors of their own
  } catch (...) {
    return "";
  }
}

}  // namespace shoal::worker
