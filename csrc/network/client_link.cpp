#include "network/client_link.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>

#include "base/clock.h"
#include "network/data_connections.h"
#include "network/in_order.h"
#include "network/lane.h"
#include "network/tls/socket_reader.h"
#include "transport/location_table.h"
#include "transport/ring.h"
#include "wire/limits.h"

namespace shoal::network {
namespace {

constexpr size_t kBatchBytes = 128 * 1024;
constexpr int64_t kSpinUs = 30;
// While the worker has this many messages queued, the link sends the next ones together.
constexpr uint64_t kAheadMessages = 24;
constexpr int64_t kGatherNs = 60000;
constexpr int kSilenceMs = transport::kHeartbeatLostMs;

// Closes descriptors unless somebody takes them.
class Descriptors {
 public:
  explicit Descriptors(std::vector<int> fds) : fds_(std::move(fds)) {}
  ~Descriptors() {
    for (const int fd : fds_) {
      if (fd >= 0) close(fd);
    }
  }
  Descriptors(const Descriptors&) = delete;
  size_t count() const { return fds_.size(); }
  int take(size_t index) { return std::exchange(fds_[index], -1); }

 private:
  std::vector<int> fds_;
};

// Where the bytes of sent CopyOut messages go, in their order.
class ExpectedBytes {
 public:
  void add(std::byte* to, uint64_t bytes) { ranges_.push_back({to, bytes}); }
  // Whether bytes still come into [from, + bytes).
  bool overlap(const std::byte* from, uint64_t bytes) const {
    return std::any_of(ranges_.begin(), ranges_.end(), [&](const Range& range) {
      return !range.arrived && range.to < from + bytes && from < range.to + range.bytes;
    });
  }
  // The worker announces the next bytes. Returns their number and where they go; null if nobody
  // asked for so many.
  std::pair<uint64_t, std::byte*> announced(uint64_t bytes) {
    const uint64_t number = announced_++;
    const uint64_t index = number - first_;
    if (index >= ranges_.size() || ranges_[index].bytes != bytes) return {number, nullptr};
    return {number, ranges_[index].to};
  }
  void arrived(uint64_t number) {
    ranges_[number - first_].arrived = true;
    for (; !ranges_.empty() && ranges_.front().arrived; ++first_) ranges_.pop_front();
  }

 private:
  struct Range {
    std::byte* to;
    uint64_t bytes;
    bool arrived = false;
  };
  std::deque<Range> ranges_;
  uint64_t first_ = 0;      // number of the first range
  uint64_t announced_ = 0;  // ranges whose bytes the worker has announced
};

// The rings and tables that the client sees in place of a worker's.
struct Regions {
  memory::SharedMemory requests, replies, progress, locations;
};

}  // namespace

struct ClientLink::State {
  Regions regions;
  transport::Progress* progress = nullptr;
  std::unique_ptr<Connection> up, down;
  Lanes up_lanes, down_lanes;
  std::unique_ptr<transport::RingConsumer> consumer;  // of the requests; the sender's
  std::unique_ptr<transport::RingProducer> producer;  // of the replies; in the order of `down`

  std::atomic<bool> stopped{false}, abandoned{false};
  std::atomic<uint64_t> sent{0};  // the last message up to which memory may change
  Order leaving{kHeldBytesMax}, arriving{kHeldBytesMax};
  mutable std::mutex mutex;
  std::condition_variable changed;
  int running = 0;                      // threads
  std::optional<ConnectionLost> ended;  // and why
  ExpectedBytes expected;

  void fail(const ConnectionLost& lost) {
    {
      const std::lock_guard held(mutex);
      if (!ended) ended = lost;
      stopped = true;
    }
    up->shutdown();
    down->shutdown();
    for (const Lanes* lanes : {&up_lanes, &down_lanes}) {
      for (const auto& lane : *lanes) lane->stop();
    }
    leaving.stop();
    arriving.stop();
    consumer->nudge();
    changed.notify_all();
  }

  transport::Liveness liveness() {
    return [this] {
      if (stopped) throw ConnectionLost("the session was closed");
    };
  }

  void run(const std::string& name, const std::function<void()>& loop) {
    prctl(PR_SET_NAME, name.c_str());
    try {
      loop();
    } catch (const ConnectionLost& lost) {
      fail(lost);
    } catch (const std::exception& error) {
      fail(ConnectionLost(error.what()));
    }
    const std::lock_guard held(mutex);
    --running;
    changed.notify_all();
  }

  // --- up

  // Waits for bytes that the worker still sends into [from, + bytes).
  void awaitArrival(const std::byte* from, uint64_t bytes) {
    std::unique_lock held(mutex);
    changed.wait(held, [&] { return stopped || !expected.overlap(from, bytes); });
    liveness()();
  }

  bool outstanding(const std::byte* from, uint64_t bytes) {
    const std::lock_guard held(mutex);
    return expected.overlap(from, bytes);
  }

  // The next bytes to send; only the sender uses it.
  std::vector<uint64_t> batch;
  bool unflushed = false;

  void push(bool flush) {
    if (!batch.empty()) up->write(batch.data(), batch.size() * 8);
    batch.clear();
    unflushed = !flush;
    if (flush) up->flush();
  }

  void sendLoop() {
    transport::RingConsumer& ring = *consumer;
    std::vector<uint64_t> message;
    batch.reserve(2 * kBatchBytes / 8);
    uint64_t sequence = 0;
    while (true) {
      if (!ring.poll(message)) {
        if (!batch.empty() || unflushed) {
          push(/*flush=*/true);
          gather(sequence);
        } else {
          ring.wait(kSpinUs, /*timeout_ms=*/1000);
        }
        continue;
      }
      ++sequence;
      const bool is_copy = wire::MessageList<wire::CopyIn, wire::CopyOut>::decode(
          message, wire::Overloaded{[&](const wire::CopyIn& copy) { sendBytes(copy, sequence); },
                                    [&](const wire::CopyOut& copy) { expectBytes(copy); }});
      if (!is_copy) batch.insert(batch.end(), message.begin(), message.end());
      if (batch.size() * 8 >= kBatchBytes) push(/*flush=*/false);
    }
  }

  void expectBytes(wire::CopyOut copy) {
    {
      const std::lock_guard held(mutex);
      expected.add(reinterpret_cast<std::byte*>(copy.host), copy.bytes);
    }
    copy.host = 0;
    wire::append(batch, copy);
  }

  // Sends a CopyIn and its bytes: behind it, or by a lane.
  void sendBytes(wire::CopyIn copy, uint64_t sequence) {
    auto* data = reinterpret_cast<std::byte*>(copy.host);
    const uint64_t bytes = copy.bytes;
    if (outstanding(data, bytes)) {
      push(/*flush=*/true);
      awaitArrival(data, bytes);
    }
    const uint32_t lane = chooseLane(up_lanes, bytes);
    copy.host = lane;
    wire::append(batch, copy);
    if (lane > 0) {
      const uint64_t ticket = leaving.expect();
      Lane::Chunk chunk{data, bytes, [this, ticket] { leaving.arrived(ticket); }};
      if (!up_lanes[lane - 1]->tryPush(chunk)) {
        push(/*flush=*/true);  // a worker takes chunks only after it has the message
        up_lanes[lane - 1]->push(std::move(chunk));
      }
    } else {
      push(/*flush=*/false);
      up->write(data, bytes);
    }
    leaving.thenLatest([this, sequence] { sent.store(sequence, std::memory_order_release); });
  }

  // A worker that is behind loses nothing if the next messages arrive together, and both sides save
  // system calls.
  void gather(uint64_t sequence) {
    if (sequence < progress->done.load(std::memory_order_relaxed) + kAheadMessages) return;
    const timespec pause{0, kGatherNs};
    nanosleep(&pause, nullptr);
  }

  // --- down

  void receiveLoop() {
    down->setSilence(kSilenceMs);
    Reader reader(*down);
    std::vector<uint64_t> frame;
    while (true) {
      reader.message(frame, "a frame", 16);
      const uint16_t kind = wire::headerKind(frame[0]);
      if (kind < wire::kKindsEnd) {
        wire::read<wire::Reply>(frame);  // throws if that is none
        if (arriving.quiet()) {
          publish(frame);
        } else {
          arriving.then(frame.size() * 8, [this, frame] { publish(frame); });
        }
        continue;
      }
      const wire::Overloaded handlers{
          [&](const ProgressFrame& told) { advance(told); },
          [&](const MomentFrame& told) {
            transport::note(*progress, told.event, {told.ns, told.waited_ns});
          },
          [&](const DataFrame& data) { receiveData(reader, data); },
          [](const GoodbyeFrame& goodbye) {
            throw ConnectionLost("its worker ended the session: " + std::string(goodbye.text));
          },
      };
      bool known = false;
      try {
        known = DownFrames::decode(frame, handlers);
      } catch (const wire::ProtocolError&) {
      }
      if (!known) {
        throw ConnectionLost("the worker sent a frame of malformed or unknown kind " +
                             std::to_string(kind));
      }
    }
  }

  void advance(const ProgressFrame& told) {
    progress->heartbeat.store(told.heartbeat, std::memory_order_relaxed);
    arriving.thenLatest([this, done = told.done, failed = told.failed] {
      progress->failed.store(static_cast<uint32_t>(failed), std::memory_order_relaxed);
      transport::publish(*progress, done);
    });
  }

  void publish(const std::vector<uint64_t>& reply) {
    uint64_t* words = producer->reserve(reply.size() * 8);
    std::copy(reply.begin(), reply.end(), words);
    producer->commit(reply.size() * 8);
  }

  // The worker says how many bytes; where they go, only we know.
  void receiveData(Reader& reader, DataFrame data) {
    const auto [bytes, lane] = data;
    std::byte* to = nullptr;
    uint64_t number = 0;
    {
      const std::lock_guard held(mutex);
      std::tie(number, to) = expected.announced(bytes);
    }
    if (to == nullptr || lane > down_lanes.size()) {
      throw ConnectionLost("the worker sent bytes that nobody asked for");
    }
    if (lane == 0) {
      reader.read(to, bytes);
      return arrived(number);
    }
    const uint64_t ticket = arriving.expect();
    down_lanes[lane - 1]->push({to, bytes, [this, number, ticket] {
                                  arrived(number);
                                  arriving.arrived(ticket);
                                }});
  }

  void arrived(uint64_t number) {
    {
      const std::lock_guard held(mutex);
      expected.arrived(number);
    }
    changed.notify_all();
  }
};

ClientLink::ClientLink(ClientLinkOptions options) : state_(std::make_shared<State>()) {
  using memory::SharedMemory;
  Descriptors up(std::move(options.up_fds)), down(std::move(options.down_fds));
  if (up.count() == 0 || down.count() == 0 || std::max(up.count(), down.count()) > kLanesMax + 1) {
    throw ConnectionLost("a link has one stream and at most " + std::to_string(kLanesMax) +
                         " lanes in each direction");
  }
  State& s = *state_;
  s.regions.requests =
      SharedMemory::create("shoal-requests", transport::ringRegionBytes(wire::kRingBytes));
  s.regions.replies =
      SharedMemory::create("shoal-replies", transport::ringRegionBytes(wire::kReplyRingBytes));
  s.regions.progress = SharedMemory::create("shoal-progress", transport::kProgressBytes);
  s.regions.locations = SharedMemory::create("shoal-locations", transport::kLocationTableBytes);
  s.progress = reinterpret_cast<transport::Progress*>(s.regions.progress.data());

  s.consumer = std::make_unique<transport::RingConsumer>(
      s.regions.requests.data(), wire::kRingBytes, wire::kMessageBytesMax, s.liveness());

  s.producer = std::make_unique<transport::RingProducer>(s.regions.replies.data(),
                                                         wire::kReplyRingBytes, s.liveness());

  const int64_t deadline = nowNs() + kGreetingMs * 1000000;
  const Tls tls(options.identity);
  // All at the same time: each handshake costs round trips.
  const auto open = [&](Descriptors& fds, Purpose purpose) {
    std::vector<std::future<std::unique_ptr<Connection>>> opening;
    for (size_t lane = 0; lane < fds.count(); ++lane) {
      const Greeting greeting{
          options.secret, purpose,
          laneWord(static_cast<uint32_t>(lane), static_cast<uint32_t>(fds.count() - 1))};
      opening.push_back(std::async(std::launch::async, &greet, std::cref(tls), fds.take(lane),
                                   options.server_name, greeting, deadline));
    }
    return opening;
  };
  auto ups = open(up, Purpose::kUp), downs = open(down, Purpose::kDown);
  s.up = ups[0].get();
  s.down = downs[0].get();
  for (size_t i = 1; i < ups.size(); ++i) {
    s.up_lanes.push_back(std::make_unique<Lane>(ups[i].get(), Lane::Direction::kSend));
  }
  for (size_t i = 1; i < downs.size(); ++i) {
    s.down_lanes.push_back(std::make_unique<Lane>(downs[i].get(), Lane::Direction::kReceive));
    s.down_lanes.back()->connection().setSilence(kSilenceMs);
  }
  s.running = static_cast<int>(2 + s.up_lanes.size() + s.down_lanes.size());
  const auto start = [&](const std::string& name, std::function<void()> loop) {
    std::thread([state = state_, name, loop = std::move(loop)] {
      state->run(name, loop);
    }).detach();
  };
  start("shoal-up", [&s] { s.sendLoop(); });
  start("shoal-down", [&s] { s.receiveLoop(); });
  for (const auto& lane : s.up_lanes) start("shoal-up-lane", [&lane = *lane] { lane.run(); });
  for (const auto& lane : s.down_lanes) start("shoal-down-lane", [&lane = *lane] { lane.run(); });
}

ClientLink::~ClientLink() {
  stop();
}

size_t ClientLink::lanes() const {
  return std::max(state_->up_lanes.size(), state_->down_lanes.size());
}

std::vector<int> ClientLink::fds() const {
  const State& s = *state_;
  std::vector<int> fds;
  for (const auto* region :
       {&s.regions.requests, &s.regions.replies, &s.regions.progress, &s.regions.locations}) {
    fds.push_back(fcntl(region->fd(), F_DUPFD_CLOEXEC, 0));
  }
  return fds;
}

bool ClientLink::awaitSent(uint64_t sequence, int64_t timeout_ms) {
  State& s = *state_;
  const timespec pause{0, 50000};
  const int64_t end = nowNs() + timeout_ms * 1000000;
  while (s.sent.load(std::memory_order_acquire) < sequence && !s.stopped) {
    if (nowNs() > end) return false;
    nanosleep(&pause, nullptr);
  }
  if (s.stopped) stop();  // a lane may have stopped in the middle of a copy
  return true;
}

std::string ClientLink::failure() const {
  if (!state_->stopped || state_->abandoned) return "";
  const std::lock_guard held(state_->mutex);
  return state_->ended ? state_->ended->what() : "";
}

ConnectionLost::Cause ClientLink::failureCause() const {
  const std::lock_guard held(state_->mutex);
  return state_->ended ? state_->ended->cause() : ConnectionLost::Cause::kOther;
}

void ClientLink::stop() noexcept {
  State& s = *state_;
  if (s.abandoned || s.up == nullptr || s.down == nullptr) return;  // or never begun
  s.fail(ConnectionLost("the session was closed"));
  std::unique_lock held(s.mutex);
  s.changed.wait(held, [&] { return s.running == 0; });
}

void ClientLink::abandon() noexcept {
  State& s = *state_;
  s.stopped = true;
  s.abandoned = true;  // a thread that the child does not have may hold the lock
  if (s.up != nullptr) s.up->abandon();
  if (s.down != nullptr) s.down->abandon();
  for (const Lanes* lanes : {&s.up_lanes, &s.down_lanes}) {
    for (const auto& lane : *lanes) lane->connection().abandon();
  }
}

}  // namespace shoal::network
