#include "worker/memory/copier.h"

#include <sys/prctl.h>

#include <algorithm>

#include "base/clock.h"
#include "transport/ring.h"

namespace shoal::worker {
namespace {

bool isDone(const CopyJob& job) {
  const uint64_t goal = job.cancelled || job.error != nullptr ? job.begun_bytes : job.bytes;
  return job.copied_bytes == goal;
}

}  // namespace

Copier::Copier(const SwapSpace& swap) : swap_(swap) {
  thread_ = std::thread([this] {
    prctl(PR_SET_NAME, "shoal-copier");
    run();
  });
}

Copier::~Copier() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Copier::submit(std::shared_ptr<CopyJob> job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  wake_.notify_one();
}

bool Copier::done(const CopyJob& job) {
  const std::lock_guard lock(mutex_);
  return isDone(job);
}

size_t Copier::waiting() {
  const std::lock_guard lock(mutex_);
  return jobs_.size();
}

int64_t Copier::wait(CopyJob& job) {
  const int64_t start = nowNs();
  std::unique_lock lock(mutex_);
  while (copyPage(job, lock)) {
  }
  finished_.wait(lock, [&job] { return isDone(job); });
  return nowNs() - start;
}

uint64_t Copier::cancel(CopyJob& job) {
  std::unique_lock lock(mutex_);
  job.cancelled = true;
  finished_.wait(lock, [&job] { return isDone(job); });
  return job.copied_bytes;
}

// Copies the next page of a job that no thread has taken. Returns false if there is none.
bool Copier::copyPage(CopyJob& job, std::unique_lock<std::mutex>& lock) {
  if (job.cancelled || job.error != nullptr || job.begun_bytes == job.bytes) return false;
  const uint64_t at = job.begun_bytes;
  const uint64_t bytes = std::min(kPageBytes, job.bytes - at);
  job.begun_bytes += bytes;
  std::exception_ptr error;
  lock.unlock();
  try {
    if (job.out) {
      swap_.write(job.block, at, job.data + at, bytes);
    } else {
      swap_.read(job.block, at, job.data + at, bytes);
    }
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  job.copied_bytes += bytes;
  if (error != nullptr) job.error = error;
  if (isDone(job)) finished_.notify_all();
  return true;
}

void Copier::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    const std::shared_ptr<CopyJob> job = jobs_.front();
    if (!copyPage(*job, lock)) jobs_.pop_front();
  }
}

}  // namespace shoal::worker
