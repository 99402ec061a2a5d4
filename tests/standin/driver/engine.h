// Streams, events and the order in which their work runs. See README.md for the modes.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "checker.h"
#include "cuda_types.h"

namespace standin {

// A point in a stream that others wait for.
struct Point {
  bool done = false;
  int64_t time_ns = 0;  // when it was reached
  Clock clock;
  struct Stream* stream = nullptr;
};

enum class Lane { kKernel, kUp, kDown, kPeer };  // which part of a device a task keeps busy

struct Task {
  std::string name;
  std::vector<Access> accesses;
  std::function<void()> run;       // throws: the device's context is lost
  std::function<bool()> gate;      // the task starts when this is true
  std::shared_ptr<Point> waits;    // … and this is done
  std::shared_ptr<Point> reaches;  // done when the task is
  Lane lane = Lane::kKernel;
  bool takes_time = false;
  uint64_t cost_bytes = 0;     // 0: those of its accesses
  bool kernel = false;         // counted as one
  bool host_may_poll = false;  // what it does can be seen without asking the driver
  int64_t issued_ns = 0;
  Clock clock;
};

struct Stream {
  int device;
  uint32_t number;
  std::string name;
  std::deque<Task> queue;
  bool running = false;  // its first task is
  bool closed = false;
  Clock clock;
  uint64_t issued = 0;
  int64_t free_ns = 0;  // `threads`: when its last task ends
  std::thread thread;
  std::shared_ptr<Point> end;  // of what was issued last
};

struct Event {
  std::shared_ptr<Point> point;  // null: never recorded
  int asked = 0;                 // how often a query said no
  bool timing = true;
};

class Engine {
 public:
  Stream* newStream(int device, const std::string& name);
  void closeStream(Stream* stream);

  // Appends a task and returns at once.
  std::shared_ptr<Point> issue(Stream& stream, Task task);
  void record(Event& event, Stream& stream);
  void waitFor(Stream& stream, const Event& event);
  // Blocks the host. Returns the context's error, if it has one.
  CUresult wait(const std::shared_ptr<Point>& point);
  CUresult waitForStream(Stream& stream);
  CUresult waitForDevice(int device);
  bool query(const std::shared_ptr<Point>& point, int& asked);
  bool query(Stream& stream);

  CUresult sticky() const { return sticky_; }
  std::string stickyText();
  void condemn(CUresult error, const std::string& text);

 private:
  using Lock = std::unique_lock<std::mutex>;
  std::shared_ptr<Point> append(Lock& lock, Stream& stream, Task task);
  static bool isReady(const Stream& stream);
  void runFirst(Lock& lock, Stream& stream);
  void perform(Lock& lock, Task& task, Stream& stream);
  void finish(Task& task, Stream& stream, int64_t now_ns);
  int64_t endOf(const Task& task, Stream& stream);
  void runUntil(Lock& lock, const std::shared_ptr<Point>& point);
  bool runOthers(Lock& lock, const Stream& but);
  bool runSomething(Lock& lock, Stream* wanted);
  bool runAtRandom(Lock& lock);
  Stream* neededFor(Stream* wanted);
  void runAllReady(Lock& lock);
  void startPatience();
  void runThread(Stream& stream);

  std::mutex lock_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Stream>> streams_;
  Clock host_;
  uint64_t waits_ = 0;
  bool patient_ = false;
  int64_t lane_free_ns_[16][4] = {};
  std::mt19937_64 random_;
  CUresult sticky_ = CUDA_SUCCESS;
  std::string sticky_text_;
};

Engine& engine();
int64_t nowNs();

}  // namespace standin
