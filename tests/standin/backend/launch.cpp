#include "../driver/api.h"
#include "../driver/standin.h"
#include "backend.h"

namespace standin {

void launchOn(c10::DeviceIndex device, const std::string& name, std::vector<Access> accesses,
              std::function<void()> run) {
  ensureDevice(device);
  const auto kernel = [run = std::move(run)] {
    try {
      run();
    } catch (const c10::Error& error) {
      throw std::runtime_error(error.what_without_backtrace());
    }
  };
  check(launch(handleOf(currentStream(device)), name, std::move(accesses), kernel), name.c_str());
}

void runNow(c10::DeviceIndex device, const std::string& name, std::vector<Access> accesses,
            const std::function<void()>& run) {
  std::exception_ptr failed;
  launchOn(device, name, std::move(accesses), [&] {
    try {
      run();
    } catch (...) {
      failed = std::current_exception();  // the host waits for it: no device assert
    }
  });
  synchronize(currentStream(device));
  if (failed != nullptr) std::rethrow_exception(failed);
}

}  // namespace standin
