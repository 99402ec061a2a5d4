#include "worker/calls/device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "transport/ring.h"
#include "wire/cursor.h"
#include "wire/limits.h"

namespace shoal::worker {
void Events::record(uint64_t event, transport::Passed now) {
  if (moments_.size() >= wire::kEventsMax) throw wire::ProtocolError("too many events are alive");
  moments_[event] = now;
  if (!device_.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    const auto found = device_events_.find(event);
    if (found == device_events_.end() && spare_.empty()) {
      spare_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    }
    if (found == device_events_.end()) {
      device_events_.emplace(event, std::move(spare_.back()));
      spare_.pop_back();
    }
    device_events_.at(event).record(guard.getStream(device_));
  }
  if (progress_ != nullptr) transport::note(*progress_, event, now);
}

Events::Elapsed Events::elapsed(uint64_t start, uint64_t end) {
  const auto from = moments_.find(start);
  const auto to = moments_.find(end);
  TORCH_CHECK(from != moments_.end() && to != moments_.end(),
              "both events must be recorded before the time between them is asked for");
  Elapsed elapsed{static_cast<double>(to->second.ns - from->second.ns) / 1e6,
                  static_cast<double>(to->second.waited_ns - from->second.waited_ns) / 1e6};
  if (!device_.is_cpu()) {
    const c10::Event& last = device_events_.at(end);
    last.synchronize();
    elapsed.all_ms = device_events_.at(start).elapsedTime(last);
  }
  return elapsed;
}

void Events::drop(uint64_t event) {
  moments_.erase(event);
  const auto found = device_events_.find(event);
  if (found == device_events_.end()) return;
  spare_.push_back(std::move(found->second));
  device_events_.erase(found);
}

at::Generator& Generators::get(uint64_t number) {
  auto found = made_.find(number);
  if (found != made_.end()) return found->second;
  if (made_.size() >= wire::kGeneratorsMax) throw wire::ProtocolError("too many generators");
  at::Generator generator;
  if (device_.is_cpu()) {
    generator =
        number == 0 ? at::detail::getDefaultCPUGenerator() : at::detail::createCPUGenerator();
  } else {
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(device_.type());
    generator = number == 0 ? hooks.getDefaultGenerator(device_.index())
                            : hooks.getNewGenerator(device_.index());
  }
  return made_.emplace(number, std::move(generator)).first->second;
}

}  // namespace shoal::worker
