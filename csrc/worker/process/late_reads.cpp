#include "worker/process/late_reads.h"

#include "worker/accelerator/start.h"

namespace shoal::worker {

void LateReads::add(Late& late, uint64_t sequence, std::span<const std::byte> bytes) {
  const Ticket ready = late.lanes.computed();
  {
    const std::lock_guard lock(mutex_);
    reads_.push_back({sequence, bytes, ready});
  }
  added_.notify_one();
}

LateReads::Read LateReads::next() {
  std::unique_lock lock(mutex_);
  added_.wait(lock, [this] { return !reads_.empty(); });
  const Read read = reads_.front();
  reads_.pop_front();
  return read;
}

void LateReads::run(Accelerator& device, Late& late) {
  enterDevice(device.device());
  while (true) {
    const Read read = next();
    device.wait(read.ready);
    ring_.sendEarly(wire::Kind::kRead, wire::ErrorKind::kNone, read.sequence,
                    dataPayload(read.bytes));
    late.readAnswered();
  }
}

}  // namespace shoal::worker
