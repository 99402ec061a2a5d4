// The life of a worker process: one session on one device, from the hand-over of its socket until
// the client is gone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "network/data_connections.h"
#include "worker/peers/peers.h"

namespace shoal::worker {

struct ExecutorOptions;

struct WorkerOptions {
  int socket = -1;         // connected to the client; the session ends when it closes
  int client_pidfd = -1;   // the client's process; its forked children may keep the socket
  int last_words_fd = -1;  // see transport/ending.h
  uint32_t session = 1;
  std::string device = "cpu";
  std::string name = "cpu";  // what errors call this device
  uint64_t memory_bytes = 0;
  int host_fd = -1;  // the client's region: pinned memory and staging; -1: it is remote
  uint64_t host_bytes = 0;
  // Where the device server listens for data connections of a remote client and of remote workers.
  std::optional<network::ArrivalsOptions> arrivals;
  uint64_t spill_host_bytes = 0, spill_disk_bytes = 0;
  std::string spill_directory;
  int block_fd = -1;          // transport/session_block.h, of the device server; -1: there is none
  int orders_fd = -1;         // an event: the server has written orders there
  int reports_fd = -1;        // an event for the server: the worker has
  bool least_recent = false;  // page by plain LRU on demand, to compare with
  double speed = 1.0;
  int threads = 1;
};

// The regions that the worker makes and others map too: its client, and the devices of the lease.
// The arena is a CPU device's memory. Of an accelerator it has copies for peers, and its client
// ignores it.
struct SharedRegions {
  int requests_fd, replies_fd, progress_fd, locations_fd, arena_fd;
  uint64_t arena_bytes;
};

class Worker {
 public:
  explicit Worker(WorkerOptions options);
  ~Worker();
  SharedRegions regions() const;
  // The devices of the lease, this one among them, in the lease's order. Before serve().
  void addPeer(PeerOptions options);
  void addSelf(std::string name);
  // `certificate` is the peer's own; `member` is this device's own index in the lease.
  void addPeerElsewhere(network::PeerEndpoint endpoint, const std::string& certificate,
                        uint32_t member, std::string name);
  // Serves the session until the client closes it. Then the process ends.
  [[noreturn]] void serve();

 private:
  ExecutorOptions executorOptions() const;
  // Runs a loop without an end. The process ends with it.
  [[noreturn]] void guarded(const std::function<void()>& loop) const;
  void welcomeArrivals(transport::Progress* progress);
  void servePeer(network::Connection& connection, const network::Greeting& greeting);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shoal::worker
