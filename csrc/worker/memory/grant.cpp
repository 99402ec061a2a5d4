#include "worker/memory/grant.h"

#include <time.h>
#include <unistd.h>

namespace shoal::worker {

void Grant::publishUsed(uint64_t used_bytes) {
  block_.used_bytes.store(used_bytes, std::memory_order_relaxed);
  const uint64_t all = used_bytes + block_.away_bytes.load(std::memory_order_relaxed);
  if (all > block_.peak_bytes.load(std::memory_order_relaxed)) {
    block_.peak_bytes.store(all, std::memory_order_relaxed);
  }
}

void Grant::moveAway(int64_t bytes) {
  transport::addTo(block_.away_bytes, static_cast<uint64_t>(bytes));  // modulo 2^64
}

void Grant::publishSwap(uint64_t bytes) {
  swap_bytes_ = bytes;
  block_.swap_bytes.store(swap_bytes_ + aside_bytes_, std::memory_order_relaxed);
}

void Grant::setAside(uint64_t bytes) {
  moveAway(static_cast<int64_t>(bytes - aside_bytes_));
  aside_bytes_ = bytes;
  publishSwap(swap_bytes_);
}

bool Grant::await(uint64_t bytes) {
  const auto end = [this] { block_.wanted_bytes.store(0, std::memory_order_relaxed); };
  block_.wanted_bytes.store(bytes, std::memory_order_release);
  ring();
  // The other programs shrink when their calls end. The watch thread ends this process if its
  // client is gone.
  const timespec pause{0, 500000};
  while (limitBytes() < bytes) {
    if (ceilingBytes() < bytes) {
      end();
      return false;
    }
    nanosleep(&pause, nullptr);
  }
  end();
  return true;
}

void Grant::ring() const {
  const uint64_t one = 1;
  // A full counter rings too.
  if (rings_ >= 0) [[maybe_unused]]
    const auto written = write(rings_, &one, sizeof one);
}

}  // namespace shoal::worker
