// A thread that copies between a device's memory and its swap space while the device computes. The
// worker's main thread decides; this one only moves bytes.
//
// A segment moves by pages. A thread that waits for a segment copies pages of it too, so it never
// waits for other segments.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "worker/memory/swap_space.h"

namespace shoal::worker {

inline constexpr uint64_t kPageBytes = uint64_t{2} << 20;

struct CopyJob {
  SwapBlock block;
  std::byte* data;
  uint64_t bytes;
  bool out;  // from the device to swap space

  // Only the copier uses these:
  uint64_t begun_bytes = 0;   // of the pages that a thread has taken
  uint64_t copied_bytes = 0;  // of the pages that are done
  bool cancelled = false;
  std::exception_ptr error;
};

class Copier {
 public:
  explicit Copier(const SwapSpace& swap);
  ~Copier();
  void submit(std::shared_ptr<CopyJob> job);
  bool done(const CopyJob& job);
  // Waits until a job is done. Returns how long that took. `job.error` says what went wrong.
  int64_t wait(CopyJob& job);
  // Cancels a job: no thread touches its pages afterwards. Returns the bytes copied so far.
  uint64_t cancel(CopyJob& job);
  size_t waiting();

 private:
  void run();
  bool copyPage(CopyJob& job, std::unique_lock<std::mutex>& lock);

  const SwapSpace& swap_;
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::deque<std::shared_ptr<CopyJob>> jobs_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace shoal::worker
