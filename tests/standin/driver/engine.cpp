#include "engine.h"

#include <time.h>

#include <algorithm>

#include "config.h"
#include "device_memory.h"
#include "shared_state.h"

namespace standin {
namespace {

constexpr size_t kQueueMax = 20000;  // a driver, too, makes a program wait that is far ahead

void pause(int64_t ns) {
  const timespec wait{ns / 1000000000, ns % 1000000000};
  nanosleep(&wait, nullptr);
}

uint64_t bytesOf(const Task& task) {
  uint64_t bytes = 0;
  for (const Access& access : task.accesses) bytes += access.bytes;
  return bytes;
}

}  // namespace

int64_t nowNs() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

Engine& engine() {
  static auto* const made = new Engine;  // its threads run until the process has ended
  return *made;
}

Stream* Engine::newStream(int device, const std::string& name) {
  const Lock lock(lock_);
  if (streams_.empty()) random_.seed(config().seed);
  const auto number = static_cast<uint32_t>(streams_.size());
  streams_.push_back(std::make_unique<Stream>());
  Stream& stream = *streams_.back();
  stream.device = device;
  stream.number = number;
  stream.name =
      name + " (stream " + std::to_string(number) + ") of device " + std::to_string(device);
  stream.clock.join(host_);
  stream.end = std::make_shared<Point>();
  stream.end->done = true;
  if (config().mode == Mode::kThreads) {
    stream.thread = std::thread([this, &stream] { runThread(stream); });
    stream.thread.detach();
  } else {
    startPatience();
  }
  return &stream;
}

void Engine::closeStream(Stream* stream) {
  waitForStream(*stream);  // the driver lets the work finish; the stand-in makes it
  const Lock lock(lock_);
  stream->closed = true;
  changed_.notify_all();
}

std::shared_ptr<Point> Engine::issue(Stream& stream, Task task) {
  Lock lock(lock_);
  const auto point = append(lock, stream, std::move(task));
  if (config().mode == Mode::kNow) runAllReady(lock);
  if (config().mode == Mode::kRandom) {
    for (uint64_t i = random_() % 4; i == 0; i = random_() % 2) {
      if (!runAtRandom(lock)) break;
    }
  }
  if (stream.queue.size() > kQueueMax) runUntil(lock, stream.queue.front().reaches);
  return point;
}

std::shared_ptr<Point> Engine::append(Lock&, Stream& stream, Task task) {
  stream.clock.join(host_);
  if (task.waits != nullptr) stream.clock.join(task.waits->clock);
  stream.clock.set(stream.number, ++stream.issued);
  if (!task.accesses.empty()) {
    counters().races +=
        checker().access(task.name, stream.number, stream.name, stream.clock, task.accesses);
  }
  if (task.reaches == nullptr) task.reaches = std::make_shared<Point>();
  const auto point = task.reaches;
  point->clock = stream.clock;
  point->stream = &stream;
  task.issued_ns = nowNs();
  stream.end = point;
  stream.queue.push_back(std::move(task));
  changed_.notify_all();
  return point;
}

void Engine::record(Event& event, Stream& stream) {
  Task task{.name = "event"};
  event.point = issue(stream, std::move(task));
  event.asked = 0;
}

void Engine::waitFor(Stream& stream, const Event& event) {
  if (event.point == nullptr) return;
  Task task{.name = "wait"};
  task.waits = event.point;
  issue(stream, std::move(task));
}

CUresult Engine::wait(const std::shared_ptr<Point>& point) {
  Lock lock(lock_);
  ++waits_;
  runUntil(lock, point);
  host_.join(point->clock);
  return sticky_;
}

CUresult Engine::waitForStream(Stream& stream) {
  std::shared_ptr<Point> end;
  {
    const Lock lock(lock_);
    end = stream.end;
  }
  return wait(end);
}

CUresult Engine::waitForDevice(int device) {
  std::vector<std::shared_ptr<Point>> ends;
  {
    const Lock lock(lock_);
    for (const auto& stream : streams_) {
      if (stream->device == device) ends.push_back(stream->end);
    }
  }
  // The newest stream first: what only came earlier in the program has not happened yet.
  for (auto end = ends.rbegin(); end != ends.rend(); ++end) wait(*end);
  return sticky_;
}

bool Engine::query(const std::shared_ptr<Point>& point, int& asked) {
  Lock lock(lock_);
  // Whoever asks again and again is waiting.
  if (!point->done && ++asked >= 3 && config().mode != Mode::kThreads) {
    ++waits_;
    runUntil(lock, point);
  }
  if (!point->done) return false;
  asked = 0;
  host_.join(point->clock);
  return true;
}

bool Engine::query(Stream& stream) {
  static thread_local int asked = 0;
  std::shared_ptr<Point> end;
  {
    const Lock lock(lock_);
    end = stream.end;
  }
  return query(end, asked);
}

std::string Engine::stickyText() {
  const Lock lock(lock_);
  return sticky_text_;
}

void Engine::condemn(CUresult error, const std::string& text) {
  if (sticky_ != CUDA_SUCCESS) return;
  sticky_text_ = text;
  sticky_ = error;
}

bool Engine::isReady(const Stream& stream) {
  if (stream.queue.empty() || stream.running) return false;
  const Task& task = stream.queue.front();
  return (task.waits == nullptr || task.waits->done) && (!task.gate || task.gate());
}

// Runs the stream's first task, which is ready. Others may issue and wait meanwhile.
void Engine::runFirst(Lock& lock, Stream& stream) {
  stream.running = true;
  Task task = std::move(stream.queue.front());
  stream.queue.pop_front();
  perform(lock, task, stream);
  stream.running = false;
  finish(task, stream, nowNs());
}

void Engine::perform(Lock& lock, Task& task, Stream& stream) {
  if (task.kernel) ++counters().kernels;
  if (!task.run || sticky_ != CUDA_SUCCESS) return;
  for (const Access& access : task.accesses) {
    if (!isDeviceAddress(access.address) || access.bytes == 0) continue;
    if (!mayUse(stream.device, access.address, access.bytes, access.writes)) {
      condemn(CUDA_ERROR_ILLEGAL_ADDRESS,
              "an illegal memory access was encountered in " + task.name);
      return;
    }
  }
  lock.unlock();
  std::string failed;
  try {
    task.run();
  } catch (const std::exception& error) {
    failed = error.what();
    if (failed.empty()) failed = "no text";
  }
  task.run = nullptr;  // what it holds may call the driver when it goes
  lock.lock();
  if (!failed.empty()) {
    condemn(CUDA_ERROR_ASSERT, "device-side assert triggered in " + task.name + ": " + failed);
  }
}

void Engine::finish(Task& task, Stream& stream, int64_t now_ns) {
  task.reaches->time_ns = now_ns;
  task.reaches->done = true;
  if (task.host_may_poll) host_.join(task.reaches->clock);
  changed_.notify_all();
}

// The stream whose first task must run so that `wanted` gets on; null: none can.
Stream* Engine::neededFor(Stream* wanted) {
  for (size_t hops = 0; wanted != nullptr && hops <= streams_.size(); ++hops) {
    if (wanted->queue.empty() || wanted->running) return nullptr;
    const Task& task = wanted->queue.front();
    if (task.waits == nullptr || task.waits->done) {
      return !task.gate || task.gate() ? wanted : nullptr;
    }
    wanted = task.waits->stream;
  }
  return nullptr;
}

void Engine::runUntil(Lock& lock, const std::shared_ptr<Point>& point) {
  if (config().mode == Mode::kThreads) {
    changed_.wait(lock, [&] { return point->done; });
    return;
  }
  // Every other wait lets all other streams run first, as far as they can. The waits between let
  // them wait as long as they may. So both kinds of missing order show.
  if (config().mode == Mode::kLate && !point->done && waits_ % 2 == 0) {
    while (runOthers(lock, *point->stream)) {
    }
  }
  while (!point->done) {
    if (!runSomething(lock, point->stream)) {
      changed_.wait_for(lock, std::chrono::microseconds(50));  // a gate, or another thread's task
    }
  }
}

bool Engine::runOthers(Lock& lock, const Stream& but) {
  for (auto stream = streams_.rbegin(); stream != streams_.rend(); ++stream) {
    if (stream->get() == &but || !isReady(**stream)) continue;
    runFirst(lock, **stream);
    return true;
  }
  return false;
}

bool Engine::runSomething(Lock& lock, Stream* wanted) {
  if (config().mode == Mode::kRandom) return runAtRandom(lock);
  Stream* needed = neededFor(wanted);
  if (needed != nullptr) {
    runFirst(lock, *needed);
    return true;
  }
  return runOthers(lock, *wanted);  // it is at a gate that they may open
}

bool Engine::runAtRandom(Lock& lock) {
  std::vector<Stream*> ready;
  for (const auto& stream : streams_) {
    if (isReady(*stream)) ready.push_back(stream.get());
  }
  if (ready.empty()) return false;
  runFirst(lock, *ready[random_() % ready.size()]);
  return true;
}

void Engine::runAllReady(Lock& lock) {
  bool ran = true;
  while (ran) {
    ran = false;
    for (size_t i = 0; i < streams_.size(); ++i) {
      while (isReady(*streams_[i])) {
        runFirst(lock, *streams_[i]);
        ran = true;
      }
    }
  }
}

// The device gets on by itself with what a host may watch without asking the driver.
void Engine::startPatience() {
  if (patient_) return;
  patient_ = true;
  std::thread([this] {
    while (true) {
      pause(config().mode == Mode::kNow ? 200000 : 2000000);
      Lock lock(lock_);
      if (config().mode == Mode::kNow) {
        runAllReady(lock);
        continue;
      }
      const int64_t before = nowNs() - config().patience_ns;
      std::shared_ptr<Point> oldest;
      for (const auto& stream : streams_) {
        for (const Task& task : stream->queue) {
          if (task.issued_ns > before) break;
          if (task.host_may_poll) oldest = task.reaches;
        }
      }
      // Not `runUntil`: behind a gate it would wait, and other streams with it.
      for (int i = 0; oldest != nullptr && !oldest->done && i < 100000; ++i) {
        Stream* needed = neededFor(oldest->stream);
        if (needed == nullptr) break;
        runFirst(lock, *needed);
      }
    }
  }).detach();
}

int64_t Engine::endOf(const Task& task, Stream& stream) {
  if (!task.takes_time) return 0;
  const Config& speeds = config();
  const double bytes_s = task.lane == Lane::kKernel ? speeds.kernel_speed
                         : task.lane == Lane::kPeer ? speeds.peer_speed
                                                    : speeds.copy_speed;
  const auto bytes = static_cast<double>(task.cost_bytes > 0 ? task.cost_bytes : bytesOf(task));
  int64_t& lane_free = lane_free_ns_[stream.device % 16][static_cast<size_t>(task.lane)];
  const int64_t start = std::max({nowNs(), stream.free_ns, lane_free});
  const int64_t took =
      speeds.delay_ns + (bytes_s > 0 ? static_cast<int64_t>(bytes / bytes_s * 1e9) : 0);
  stream.free_ns = lane_free = start + took;
  return stream.free_ns;
}

void Engine::runThread(Stream& stream) {
  Lock lock(lock_);
  while (true) {
    changed_.wait(lock, [&] { return stream.closed || !stream.queue.empty(); });
    if (stream.queue.empty()) return;
    while (!isReady(stream)) {
      if (stream.queue.front().gate) {
        changed_.wait_for(lock, std::chrono::microseconds(50));
      } else {
        changed_.wait(lock);
      }
    }
    Task task = std::move(stream.queue.front());
    stream.queue.pop_front();
    stream.running = true;
    const int64_t end = endOf(task, stream);
    perform(lock, task, stream);
    if (end > nowNs()) {
      lock.unlock();
      pause(end - nowNs());
      lock.lock();
    }
    stream.running = false;
    finish(task, stream, std::max(end, nowNs()));
  }
}

}  // namespace standin
