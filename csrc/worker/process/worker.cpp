#include "worker/process/worker.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "base/clock.h"
#include "base/log.h"
#include "memory/shared_memory.h"
#include "network/worker_link.h"
#include "transport/ending.h"
#include "transport/location_table.h"
#include "transport/progress.h"
#include "transport/ring.h"
#include "wire/limits.h"
#include "worker/execute/executor.h"
#include "worker/paging/arena.h"
#include "worker/shared/reader_memory.h"

namespace shoal::worker {
namespace {

// A sleeping worker costs its client a system call and 25 µs for the next call, so it stays awake
// in a running program. An idle one sleeps after this.
constexpr int64_t kSpinUs = 1000;
constexpr int64_t kSpinShortUs = 50;          // if the client and the lease's devices use all cores
constexpr int64_t kArrivalsNs = 10000000000;  // for a remote client to open its data connections

class RingReplies final : public ReplySink {
 public:
  RingReplies(std::byte* region, transport::Progress* progress, transport::Liveness liveness)
      : progress_(progress), ring_(region, wire::kReplyRingBytes, std::move(liveness)) {}

  void send(wire::Kind kind, wire::ErrorKind error, uint64_t sequence,
            const std::vector<uint64_t>& payload) override {
    const wire::Reply reply{static_cast<uint16_t>(error), sequence, payload};
    const size_t bytes = (1 + wire::wordsOf(reply)) * 8;
    if (bytes > wire::kMessageBytesMax) {
      throw std::length_error("a reply of " + std::to_string(bytes) + " bytes is too large");
    }
    uint64_t* words = ring_.reserve(bytes);
    words[0] = wire::headerWord(kind, static_cast<uint32_t>(bytes), reply.flags);
    wire::write(reply, words + 1);
    // A client that has the reply must find its request done. A reply reports any failure, so none
    // is left.
    progress_->failed.store(0, std::memory_order_relaxed);
    transport::publish(*progress_, sequence);
    ring_.commit(bytes);
  }

 private:
  transport::Progress* progress_;
  transport::RingProducer ring_;
};

int64_t spinUs(const Peers* peers) {
  const size_t busy = 1 + (peers == nullptr ? 1 : peers->countHere());
  return busy <= std::thread::hardware_concurrency() ? kSpinUs : kSpinShortUs;
}

bool closed(int socket) {
  pollfd peer{socket, POLLRDHUP, 0};
  return poll(&peer, 1, 0) > 0 && (peer.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

// Ends the process when the client is gone: a call may run for minutes. It also receives shared
// memory, and says by a heartbeat that the process is alive.
[[noreturn]] void watchClient(int socket, int client_pidfd, transport::Progress& progress,
                              SharedMemories& shared) {
  prctl(PR_SET_NAME, "shoal-watch");
  // Shared memory passes on one machine only. What a remote client sends is not read here.
  const short listens = client_pidfd >= 0 ? POLLIN | POLLRDHUP : POLLRDHUP;
  pollfd peers[2] = {{socket, listens, 0}, {client_pidfd, POLLIN, 0}};
  while (true) {
    const bool heard = poll(peers, 2, transport::kHeartbeatMs) > 0;
    progress.heartbeat.fetch_add(1, std::memory_order_relaxed);
    if (!heard) continue;
    if (peers[1].revents != 0) transport::endProcess(transport::Ending::kClientEnded);
    if ((peers[0].revents & ~POLLIN) != 0) transport::endWithClient(socket, client_pidfd);
    try {
      shared.receive(socket);
    } catch (const std::exception& error) {
      transport::logError(std::string("the session ends: ") + error.what());
      transport::endProcess(transport::Ending::kFailed, error.what());
    }
  }
}

[[noreturn]] void run(Executor& executor, transport::RingConsumer& requests,
                      transport::Progress& progress, int64_t spin_us) {
  std::vector<uint64_t> message;
  uint64_t sequence = 0;
  while (true) {
    if (!requests.poll(message)) {
      requests.wait(spin_us, /*timeout_ms=*/INT64_MAX / 2000000);
      continue;
    }
    executor.handle(message, ++sequence);
    progress.failed.store(executor.hasFailed() ? 1 : 0, std::memory_order_relaxed);
    transport::publish(progress, sequence);
  }
}

}  // namespace

struct Worker::State {
  WorkerOptions options;
  memory::SharedMemory requests, replies, progress, places, host;
  std::unique_ptr<Arena> arena;
  std::unique_ptr<Peers> peers;
  std::unique_ptr<network::Arrivals> arrivals;
  uint32_t member = 0;  // this device's index in the lease
  struct Elsewhere {
    uint32_t peer;
    network::PeerEndpoint endpoint;
  };
  std::vector<Elsewhere> elsewhere;
  SharedMemories shared;
  ReaderMemory reader;

  transport::Liveness liveness() const {
    return [socket = options.socket] {
      if (closed(socket)) throw transport::PeerLost("the client closed the session");
    };
  }
};

Worker::Worker(WorkerOptions options) : state_(std::make_unique<State>()) {
  using memory::SharedMemory;
  state_->requests =
      SharedMemory::create("shoal-requests", transport::ringRegionBytes(wire::kRingBytes));
  state_->replies =
      SharedMemory::create("shoal-replies", transport::ringRegionBytes(wire::kReplyRingBytes));
  state_->progress = SharedMemory::create("shoal-progress", transport::kProgressBytes);
  state_->progress.claim();  // so that peers see when this process ends
  state_->places = SharedMemory::create("shoal-places", transport::kPlacesBytes);
  state_->host = options.host_fd >= 0
                     ? SharedMemory::attach(options.host_fd, options.host_bytes)
                     : SharedMemory::create("shoal-staging", network::stagingRegionBytes());
  if (options.arrivals) {
    state_->arrivals = std::make_unique<network::Arrivals>(std::move(*options.arrivals));
  }
  if (options.device == "cpu") {
    const uint64_t addresses = Arena::addressBytes(options.memory_bytes);
    state_->arena = std::make_unique<Arena>(SharedMemory::create("shoal-arena", addresses),
                                            options.memory_bytes, options.name);
  }
  transport::setLastWords(options.last_words_fd);
  state_->options = std::move(options);
}

Worker::~Worker() = default;

SharedRegions Worker::regions() const {
  const State& s = *state_;
  return {s.requests.fd(),
          s.replies.fd(),
          s.progress.fd(),
          s.places.fd(),
          s.arena ? s.arena->region().fd() : -1,
          s.arena ? s.arena->region().bytes() : 0};
}

void Worker::addPeer(PeerOptions options) {
  if (state_->peers == nullptr) {
    state_->peers = std::make_unique<Peers>(state_->host, state_->liveness());
  }
  state_->peers->add(std::move(options));
}

void Worker::addSelf(std::string name) {
  const auto copy = [](int fd) { return fcntl(fd, F_DUPFD_CLOEXEC, 0); };
  const SharedRegions own = regions();
  addPeer({copy(own.progress_fd), copy(own.places_fd),
           own.arena_bytes > 0 ? copy(own.arena_fd) : -1, own.arena_bytes, std::move(name),
           nullptr});
}

void Worker::addPeerElsewhere(network::PeerEndpoint endpoint, uint32_t member, std::string name) {
  if (state_->arrivals == nullptr) {
    throw std::runtime_error("this device's server does not listen, so it has no peers elsewhere");
  }
  state_->member = member;
  const auto number = static_cast<uint32_t>(state_->peers == nullptr ? 0 : state_->peers->count());
  state_->elsewhere.push_back({number, endpoint});
  PeerOptions options;
  options.name = std::move(name);
  options.elsewhere = std::make_unique<network::PeerReader>(state_->arrivals->tls(),
                                                            std::move(endpoint), state_->member);
  addPeer(std::move(options));
}

void Worker::serve() {
  const WorkerOptions& options = state_->options;
  auto* progress = reinterpret_cast<transport::Progress*>(state_->progress.data());
  std::thread([&options, progress, shared = &state_->shared] {
    watchClient(options.socket, options.client_pidfd, *progress, *shared);
  }).detach();

  if (state_->arena != nullptr) c10::SetAllocator(c10::DeviceType::CPU, state_->arena.get(), 255);
  at::set_num_threads(options.threads);
  const c10::AutoGradMode no_grad(false);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;

  if (state_->arrivals != nullptr) welcomeArrivals(progress);
  const transport::Liveness liveness = state_->liveness();
  RingReplies replies(state_->replies.data(), progress, liveness);
  transport::Places places(state_->places.data());
  transport::RingConsumer requests(state_->requests.data(), wire::kRingBytes,
                                   wire::kMessageBytesMax, liveness);
  ExecutorOptions executor_options;
  executor_options.session = options.session;
  executor_options.device = c10::Device(options.device);
  executor_options.memory_bytes = options.memory_bytes;
  executor_options.peers = state_->peers.get();
  executor_options.requests = &requests;
  executor_options.swap = {options.spill_host_bytes, options.spill_disk_bytes,
                           options.spill_directory};
  executor_options.least_recent = options.least_recent;
  executor_options.places = &places;
  executor_options.progress = progress;
  executor_options.shared = &state_->shared;
  executor_options.reader = &state_->reader;
  executor_options.speed = options.speed;
  Executor executor(executor_options, state_->host, state_->arena.get(), replies);
  try {
    run(executor, requests, *progress, spinUs(state_->peers.get()));
  } catch (const transport::PeerLost&) {
    transport::endWithClient(options.socket, options.client_pidfd);
  } catch (const std::exception& error) {
    // The stream itself is broken: there is no next message to go on with.
    transport::logError("session " + std::to_string(options.session) + " ends: " + error.what());
    transport::endProcess(transport::Ending::kFailed, error.what());
  }
}

void Worker::welcomeArrivals(transport::Progress* progress) {
  network::Arrivals& arrivals = *state_->arrivals;
  arrivals.start([this](std::unique_ptr<network::Connection> connection,
                        const network::Greeting& greeting) { servePeer(*connection, greeting); },
                 [this](uint64_t number, int fd) { state_->reader.put(number, fd); });
  for (const State::Elsewhere& peer : state_->elsewhere) {
    std::thread([this, peer, progress] {
      prctl(PR_SET_NAME, "shoal-tell");
      try {
        network::tellProgress(state_->arrivals->tls(), peer.endpoint, state_->member, *progress);
      } catch (const network::ConnectionLost& error) {
        // The peer counts this device as lost when it is silent. This device notices when it next
        // needs the peer.
        transport::logWarning("device " + state_->peers->name(peer.peer) +
                              " of its lease: " + error.what());
      }
    }).detach();
  }
  if (state_->options.host_fd >= 0) return;  // the client is on this machine
  try {
    const int64_t deadline = nowNs() + kArrivalsNs;
    auto up = arrivals.await(network::Purpose::kUp, deadline);
    auto down = arrivals.await(network::Purpose::kDown, deadline);
    network::serveLink(
        {state_->requests.data(), state_->replies.data(), state_->host.data(), progress},
        std::move(up), std::move(down));
  } catch (const network::ConnectionLost& error) {
    transport::logError("session " + std::to_string(state_->options.session) +
                        " ends: " + error.what());
    transport::endProcess(transport::Ending::kFailed, error.what());
  }
}

void Worker::servePeer(network::Connection& connection, const network::Greeting& greeting) {
  transport::Progress* told =
      state_->peers == nullptr ? nullptr : state_->peers->toldBy(greeting.member);
  if (told == nullptr) return;  // the lease has no such remote device
  const transport::Places places(state_->places.data());
  const network::OwnMemory own{
      reinterpret_cast<transport::Progress*>(state_->progress.data()), &places,
      state_->arena != nullptr ? &state_->arena->region() : nullptr, &state_->host};
  try {
    if (greeting.purpose == network::Purpose::kRead) {
      network::serveReads(connection, own, *told);
    } else {
      network::followProgress(connection, *told);
    }
  } catch (const network::ConnectionLost&) {
    // The peer is gone. No thread here waits for it.
  }
}

}  // namespace shoal::worker
