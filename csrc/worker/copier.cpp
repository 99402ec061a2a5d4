#include "worker/copier.h"

#include <sys/prctl.h>

#include "transport/ring.h"

namespace shoal::worker {

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
  return job.done;
}

size_t Copier::waiting() {
  const std::lock_guard lock(mutex_);
  return jobs_.size();
}

int64_t Copier::wait(const CopyJob& job) {
  const int64_t start = transport::nowNs();
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&job] { return job.done; });
  return transport::nowNs() - start;
}

bool Copier::cancel(const CopyJob& job) {
  std::unique_lock lock(mutex_);
  // The first one is being copied.
  for (auto it = jobs_.begin(); it != jobs_.end(); ++it) {
    if (it->get() != &job) continue;
    if (it == jobs_.begin() && running_) break;
    jobs_.erase(it);
    return true;
  }
  finished_.wait(lock, [&job] { return job.done; });
  return false;
}

void Copier::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    const std::shared_ptr<CopyJob> job = jobs_.front();
    running_ = true;
    lock.unlock();
    try {
      if (job->out) {
        swap_.write(job->block, job->data, job->bytes);
      } else {
        swap_.read(job->block, job->data, job->bytes);
      }
    } catch (...) {
      job->error = std::current_exception();
    }
    lock.lock();
    jobs_.pop_front();
    running_ = false;
    job->done = true;
    finished_.notify_all();
  }
}

}  // namespace shoal::worker
