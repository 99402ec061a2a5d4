#include "worker/accelerator/late.h"

#include <unistd.h>

#include "wire/limits.h"

namespace shoal::worker {
namespace {

// Pinned pages are lost to the rest of the machine.
uint64_t registeredBytesMax() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) / 4;
}

}  // namespace

Late::Late(Accelerator& device, transport::Progress& progress)
    : lanes(device),
      registered(device, registeredBytesMax()),
      slots(device),
      device_(device),
      progress_(progress),
      reads_(memory::SharedMemory::create("shoal-reads", kReads * wire::kInlineBytesMax)) {
  device_.registerHost(reads_.data(), reads_.bytes());
}

Late::~Late() {
  device_.unregisterHost(reads_.data());
}

void Late::copyIn(Uses& uses, std::byte* data, const std::byte* host, uint64_t bytes) {
  lanes.copyIn(uses, {host, bytes}, [&] {
    registered.each(host, bytes, lanes.now(), lanes.done(), [&](uint64_t at, uint64_t part) {
      device_.copyIn(Lane::kIn, data + at, host + at, part);
    });
  });
}

void Late::copyOut(Uses& uses, std::byte* host, const std::byte* data, uint64_t bytes) {
  lanes.copyOut(uses, {host, bytes}, [&] {
    registered.each(host, bytes, lanes.now(), lanes.done(), [&](uint64_t at, uint64_t part) {
      device_.copyOut(Lane::kOut, host + at, data + at, part);
    });
  });
}

std::span<const std::byte> Late::read(const std::byte* data, uint64_t bytes) {
  for (uint64_t answered; (answered = answered_.load()) + kReads <= asked_;) {
    answered_.wait(answered);  // the client has more threads that read than places
  }
  std::byte* const to = reads_.data() + asked_++ % kReads * wire::kInlineBytesMax;
  device_.copyOut(Lane::kCompute, to, data, bytes);
  return {to, bytes};
}

void Late::readAnswered() {
  answered_.fetch_add(1);
  answered_.notify_one();
}

}  // namespace shoal::worker
