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
#include <functional>
#include <memory>
#include <thread>

#include "base/clock.h"
#include "base/futex.h"
#include "base/log.h"
#include "memory/shared_memory.h"
#include "network/tls/session_identity.h"
#include "network/worker_link.h"
#include "transport/ending.h"
#include "transport/location_table.h"
#include "transport/progress.h"
#include "transport/ring.h"
#include "wire/limits.h"
#include "worker/accelerator/start.h"
#include "worker/calls/settings.h"
#include "worker/execute/executor.h"
#include "worker/failure/lost_context.h"
#include "worker/memory/arena.h"
#include "worker/process/completion.h"
#include "worker/shared/reader_memory.h"

namespace shoal::worker {
namespace {

// A sleeping worker costs its client a system call and 25 µs for the next call, so it stays awake
// in a running program. An idle one sleeps after this.
constexpr int64_t kSpinUs = 1000;
constexpr int64_t kSpinShortUs = 50;          // if the client and the lease's devices use all cores
constexpr int64_t kSleepMs = 50;              // between two looks whether the client is there
constexpr int64_t kArrivalsNs = 10000000000;  // for a remote client to open its data connections

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
[[noreturn]] void watchClient(int socket, int client_pidfd, int orders_fd,
                              const std::function<void()>& ordered, transport::Progress& progress,
                              SharedMemories& shared) {
  prctl(PR_SET_NAME, "shoal-watch");
  // Shared memory passes on one machine only. What a remote client sends is not read here.
  const short listens = client_pidfd >= 0 ? POLLIN | POLLRDHUP : POLLRDHUP;
  pollfd peers[3] = {{socket, listens, 0}, {client_pidfd, POLLIN, 0}, {orders_fd, POLLIN, 0}};
  while (true) {
    const bool heard = poll(peers, 3, transport::kHeartbeatMs) > 0;
    progress.heartbeat.fetch_add(1, std::memory_order_relaxed);
    if (!heard) continue;
    if (peers[1].revents != 0) transport::endProcess(transport::Ending::kClientEnded);
    if ((peers[0].revents & ~POLLIN) != 0) transport::endWithClient(socket, client_pidfd);
    if (peers[2].revents != 0) {
      uint64_t count;
      if (read(orders_fd, &count, sizeof count) == sizeof count) ordered();
    }
    if (peers[0].revents == 0) continue;
    try {
      shared.receive(socket);
    } catch (const std::exception& error) {
      transport::logError(std::string("the session ends: ") + error.what());
      transport::endProcess(transport::Ending::kFailed, error.what());
    }
  }
}

[[noreturn]] void run(Executor& executor, transport::RingConsumer& requests,
                      transport::Progress& progress, int64_t spin_us,
                      const transport::Liveness& liveness, Completion* completion) {
  ServerOrders& orders = executor.orders();
  std::vector<uint64_t> message;
  uint64_t sequence = 0;
  while (true) {
    if (orders.any()) orders.obey();
    if (!requests.poll(message)) {
      if (completion != nullptr) completion->flush();
      if (requests.spin(spin_us)) continue;
      while (!orders.any() && !requests.sleep(kSleepMs)) liveness();
      continue;
    }
    if (completion != nullptr) {
      const auto kind = static_cast<wire::Kind>(wire::headerKind(message[0]));
      completion->beforeIssuing(kind);
      executor.handle(message, ++sequence);
      completion->issued(kind, sequence, executor.hasFailed());
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
  memory::SharedMemory requests, replies, progress, locations, host, block;
  std::unique_ptr<Grant> grant;        // null: no device server limits and counts the session
  std::unique_ptr<Arena> arena;        // of a CPU device
  std::unique_ptr<ShownCopies> shown;  // of an accelerator
  std::unique_ptr<Peers> peers;
  std::unique_ptr<network::Arrivals> arrivals;
  uint32_t member = 0;  // this device's index in the lease
  struct Elsewhere {
    uint32_t peer;
    network::PeerEndpoint endpoint;
    std::shared_ptr<const network::Tls> tls;  // for connections to it: accepts its certificate only
  };
  std::vector<Elsewhere> elsewhere;
  SharedMemories shared;
  ReaderMemory reader;

  const memory::SharedMemory& mappedByPeers() const {
    return arena != nullptr ? arena->region() : shown->region();
  }
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
  state_->locations = SharedMemory::create("shoal-locations", transport::kLocationTableBytes);
  state_->host = options.host_fd >= 0
                     ? SharedMemory::attach(options.host_fd, options.host_bytes)
                     : SharedMemory::create("shoal-staging", network::stagingRegionBytes());
  if (options.arrivals) {
    state_->arrivals = std::make_unique<network::Arrivals>(std::move(*options.arrivals));
  }
  if (options.block_fd >= 0) {
    state_->block = SharedMemory::attach(options.block_fd, transport::kSessionBlockBytes);
    state_->grant = std::make_unique<Grant>(
        *reinterpret_cast<transport::SessionBlock*>(state_->block.data()), options.reports_fd);
  }
  if (options.device == "cpu") {
    const uint64_t addresses = Arena::addressBytes(options.memory_bytes);
    state_->arena =
        std::make_unique<Arena>(SharedMemory::create("shoal-arena", addresses),
                                options.memory_bytes, options.name, state_->grant.get());
  } else {
    state_->shown = std::make_unique<ShownCopies>(options.memory_bytes);
  }
  transport::setLastWords(options.last_words_fd);
  state_->options = std::move(options);
}

Worker::~Worker() = default;

SharedRegions Worker::regions() const {
  const State& s = *state_;
  return {s.requests.fd(),  s.replies.fd(),         s.progress.fd(),
          s.locations.fd(), s.mappedByPeers().fd(), s.mappedByPeers().bytes()};
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
  addPeer({copy(own.progress_fd), copy(own.locations_fd),
           own.arena_bytes > 0 ? copy(own.arena_fd) : -1, own.arena_bytes, std::move(name),
           nullptr});
}

void Worker::addPeerElsewhere(network::PeerEndpoint endpoint, const std::string& certificate,
                              uint32_t member, std::string name) {
  if (state_->arrivals == nullptr) {
    throw std::runtime_error("this device's server does not listen, so it has no peers elsewhere");
  }
  state_->member = member;
  const auto number = static_cast<uint32_t>(state_->peers == nullptr ? 0 : state_->peers->count());
  endpoint.server_name = network::kSessionServerName;
  auto tls = std::make_shared<network::Tls>(state_->arrivals->identityFor(certificate));
  state_->arrivals->trust(certificate);
  PeerOptions options;
  options.name = std::move(name);
  options.elsewhere = std::make_unique<network::PeerReader>(*tls, endpoint, state_->member);
  state_->elsewhere.push_back({number, std::move(endpoint), std::move(tls)});
  addPeer(std::move(options));
}

void Worker::serve() {
  const WorkerOptions& options = state_->options;
  auto* progress = reinterpret_cast<transport::Progress*>(state_->progress.data());
  std::thread([this, &options, progress] {
    const auto ordered = [this] {
      transport::futexWake(
          &reinterpret_cast<transport::RingControl*>(state_->requests.data())->tail);
      if (state_->grant != nullptr) transport::futexWake(&state_->grant->block().order);
    };
    watchClient(options.socket, options.client_pidfd, options.orders_fd, ordered, *progress,
                state_->shared);
  }).detach();

  if (state_->arena != nullptr) c10::SetAllocator(c10::DeviceType::CPU, state_->arena.get(), 255);
  const c10::Device device(options.device);
  startDevice(device);
  applySettings({});
  at::set_num_threads(options.threads);
  const c10::AutoGradMode no_grad(false);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;

  if (state_->arrivals != nullptr) welcomeArrivals(progress);
  const transport::Liveness liveness = state_->liveness();
  RingReplies ring(state_->replies.data(), *progress, liveness);
  std::unique_ptr<Completion> completion;  // only of a device that runs late
  if (!device.is_cpu()) completion = std::make_unique<Completion>(*progress, ring);
  ReplySink& replies = completion == nullptr ? static_cast<ReplySink&>(ring) : *completion;
  transport::LocationTable locations(state_->locations.data());
  transport::RingConsumer requests(state_->requests.data(), wire::kRingBytes,
                                   wire::kMessageBytesMax, liveness);
  ExecutorOptions executor_options = executorOptions();
  executor_options.requests = &requests;
  executor_options.locations = &locations;
  Executor executor(executor_options, state_->host, state_->arena.get(), replies);
  if (completion != nullptr) {
    completion->start(executor.device(), *executor.late());
    const auto start = [this](const char* name, std::function<void()> loop) {
      std::thread([this, name, loop = std::move(loop)] {
        prctl(PR_SET_NAME, name);
        guarded(loop);
      }).detach();
    };
    start("shoal-done", [&completion] { completion->run(); });
    start("shoal-reads", [&completion] { completion->runReads(); });
  }
  guarded([&] {
    run(executor, requests, *progress, spinUs(state_->peers.get()), liveness, completion.get());
  });
}

ExecutorOptions Worker::executorOptions() const {
  const WorkerOptions& options = state_->options;
  ExecutorOptions found;
  found.session = options.session;
  found.device = c10::Device(options.device);
  found.memory_bytes = options.memory_bytes;
  found.peers = state_->peers.get();
  found.swap = {options.spill_host_bytes, options.spill_disk_bytes, options.spill_directory,
                state_->grant.get()};
  found.grant = state_->grant.get();
  found.least_recent = options.least_recent;
  found.progress = reinterpret_cast<transport::Progress*>(state_->progress.data());
  found.shared = &state_->shared;
  found.reader = &state_->reader;
  found.speed = options.speed;
  found.shown = state_->shown.get();
  return found;
}

void Worker::guarded(const std::function<void()>& loop) const {
  const WorkerOptions& options = state_->options;
  try {
    loop();
  } catch (const transport::PeerLost&) {
    transport::endWithClient(options.socket, options.client_pidfd);
  } catch (const std::exception& error) {
    const std::string lost =
        lostContext(std::current_exception(), c10::Device(options.device), /*in_operator=*/false);
    if (!lost.empty()) {
      transport::endProcess(transport::Ending::kDeviceFailed,
                            lost +
                                ". It showed in a wait for the device. An earlier call is the "
                                "cause; SHOAL_BLOCKING=1 finds it");
    }
    // The stream itself is broken: there is no next message to go on with.
    transport::logError("session " + std::to_string(options.session) + " ends: " + error.what());
    transport::endProcess(transport::Ending::kFailed, error.what());
  }
  std::abort();  // the loops never return
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
        network::tellProgress(*peer.tls, peer.endpoint, state_->member, *progress);
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
  const transport::LocationTable locations(state_->locations.data());
  const network::ShownMemory own{reinterpret_cast<transport::Progress*>(state_->progress.data()),
                                 &locations, state_->mappedByPeers().span(), state_->host.span()};
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
