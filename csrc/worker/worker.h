// The life of a worker process: one session on one device, from the hand-over of its socket until
// the client is gone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shoal::worker {

struct WorkerOptions {
  int socket = -1;        // connected to the client; its end is the end of the session
  int client_pidfd = -1;  // the client's process: its forked children may keep the socket open
  uint32_t session = 1;
  std::string device = "cpu";
  std::string name = "cpu";  // what errors call this device
  uint64_t memory_bytes = 0;
  int host_fd = -1;  // the client's own region: pinned memory and staging
  uint64_t host_bytes = 0;
  double speed = 1.0;
  int threads = 1;
};

// The regions that the worker makes and its client maps too.
struct SharedRegions {
  int requests_fd, replies_fd, progress_fd, arena_fd;
  uint64_t arena_bytes;
};

class Worker {
 public:
  explicit Worker(WorkerOptions options);
  ~Worker();
  SharedRegions regions() const;
  // Serves the session until the client closes it. Never returns: the process ends here.
  [[noreturn]] void serve();

 private:
  struct State;
  State* state_;
};

}  // namespace shoal::worker
