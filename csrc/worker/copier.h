// A thread that copies between a device's memory and its swap space while the device computes. All
// decisions are made by the worker's own thread; this one only moves bytes.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "worker/swap_space.h"

namespace shoal::worker {

struct CopyJob {
  SwapBlock block;
  std::byte* data;
  uint64_t bytes;
  bool out;  // from the device to swap space
  bool done = false;
  std::exception_ptr error;
};

class Copier {
 public:
  explicit Copier(const SwapSpace& swap);
  ~Copier();
  void submit(std::shared_ptr<CopyJob> job);
  bool done(const CopyJob& job);
  // Waits for a job; returns the time that this took. What went wrong is in the job.
  int64_t wait(const CopyJob& job);
  // The job need not be done. True if it never will be; else it is done already, or is waited for.
  bool cancel(const CopyJob& job);
  size_t waiting();

 private:
  void run();

  const SwapSpace& swap_;
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::deque<std::shared_ptr<CopyJob>> jobs_;
  bool running_ = false;  // the first of `jobs_` is being copied
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace shoal::worker
