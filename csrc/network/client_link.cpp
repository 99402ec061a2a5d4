#include "network/client_link.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "network/reader.h"
#include "transport/places.h"
#include "transport/ring.h"
#include "wire/limits.h"

namespace shoal::network {
namespace {

constexpr size_t kBatchBytes = 128 * 1024;
constexpr int64_t kSpinUs = 30;
// While the worker has this many messages before it, the next ones are sent together.
constexpr uint64_t kAheadMessages = 24;
constexpr int64_t kGatherNs = 60000;
constexpr int kSilenceMs = transport::kHeartbeatLostMs;
constexpr size_t kCopyWords = 4;

// A descriptor that is closed unless somebody takes it.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  int take() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

}  // namespace

struct ClientLink::State {
  memory::SharedMemory requests, replies, progress_region, places;
  transport::Progress* progress = nullptr;
  std::unique_ptr<Connection> up, down;
  std::unique_ptr<transport::RingConsumer> consumer;  // of the requests; the sender's

  std::atomic<bool> stopped{false}, abandoned{false};
  std::atomic<uint64_t> sent{0};  // messages whose memory may change
  mutable std::mutex mutex;
  std::condition_variable changed;
  int running = 0;      // threads
  std::string failure;  // why it ended
  // Where the bytes of messages that were sent have to go, in their order.
  struct Expected {
    std::byte* to;
    uint64_t bytes;
  };
  std::deque<Expected> expected;

  void fail(const std::string& reason) {
    {
      const std::lock_guard held(mutex);
      if (failure.empty()) failure = reason;
    }
    stopped = true;
    up->shutdown();
    down->shutdown();
    consumer->nudge();
    changed.notify_all();
  }

  transport::Liveness liveness() {
    return [this] {
      if (stopped) throw ConnectionLost("the session was closed");
    };
  }

  void run(const char* name, void (State::*loop)()) {
    prctl(PR_SET_NAME, name);
    try {
      (this->*loop)();
    } catch (const std::exception& error) {
      fail(error.what());
    }
    const std::lock_guard held(mutex);
    --running;
    changed.notify_all();
  }

  // --- up

  // Bytes that are still to come from the worker into [from, + bytes) come first.
  void awaitArrival(const std::byte* from, uint64_t bytes) {
    std::unique_lock held(mutex);
    changed.wait(held, [&] {
      if (stopped) return true;
      for (const Expected& e : expected) {
        if (e.to < from + bytes && from < e.to + e.bytes) return false;
      }
      return true;
    });
    liveness()();
  }

  bool outstanding(const std::byte* from, uint64_t bytes) {
    const std::lock_guard held(mutex);
    for (const Expected& e : expected) {
      if (e.to < from + bytes && from < e.to + e.bytes) return true;
    }
    return false;
  }

  void sendLoop() {
    transport::RingConsumer& ring = *consumer;
    std::vector<uint64_t> message;
    std::vector<uint64_t> batch;
    batch.reserve(2 * kBatchBytes / 8);
    uint64_t sequence = 0;
    bool unflushed = false;
    const auto push = [&](bool flush) {
      if (!batch.empty()) up->write(batch.data(), batch.size() * 8);
      batch.clear();
      unflushed = !flush;
      if (flush) up->flush();
    };
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
      const uint16_t kind = wire::headerKind(message[0]);
      const bool in = kind == static_cast<uint16_t>(wire::Kind::kCopyIn);
      const bool out = kind == static_cast<uint16_t>(wire::Kind::kCopyOut);
      if ((in || out) && message.size() == kCopyWords) {
        auto* data = reinterpret_cast<std::byte*>(message[3]);
        const uint64_t bytes = message[2];
        message[3] = 0;
        if (in && outstanding(data, bytes)) {
          push(/*flush=*/true);
          awaitArrival(data, bytes);
        }
        if (out) {
          const std::lock_guard held(mutex);
          expected.push_back({data, bytes});
        }
        batch.insert(batch.end(), message.begin(), message.end());
        if (in) {
          push(/*flush=*/false);
          up->write(data, bytes);
        }
      } else {
        batch.insert(batch.end(), message.begin(), message.end());
      }
      sent.store(sequence, std::memory_order_release);
      if (batch.size() * 8 >= kBatchBytes) push(/*flush=*/false);
    }
  }

  // A worker that is behind loses nothing if the next messages come together, and both sides save
  // a system call for each.
  void gather(uint64_t sequence) {
    if (sequence < progress->completed.load(std::memory_order_relaxed) + kAheadMessages) return;
    const timespec pause{0, kGatherNs};
    nanosleep(&pause, nullptr);
  }

  // --- down

  void receiveLoop() {
    transport::RingProducer ring(replies.data(), wire::kReplyRingBytes, liveness());
    down->setSilence(kSilenceMs);
    Reader reader(*down);
    std::vector<uint64_t> body;
    while (true) {
      const uint64_t header = reader.word();
      const size_t bytes = wire::headerBytes(header);
      const uint16_t kind = wire::headerKind(header);
      if (bytes < 16 || bytes % 8 != 0 || bytes > wire::kMessageBytesMax) {
        throw ConnectionLost("the worker sent a frame of " + std::to_string(bytes) + " bytes");
      }
      body.resize(bytes / 8 - 1);
      reader.read(body.data(), bytes - 8);
      if (kind <= static_cast<uint16_t>(wire::Kind::kLast)) {
        uint64_t* words = ring.reserve(bytes);
        words[0] = header;
        std::copy(body.begin(), body.end(), words + 1);
        ring.commit(bytes);
      } else if (kind == kFrameProgress && body.size() == 3) {
        progress->failed.store(static_cast<uint32_t>(body[1]), std::memory_order_relaxed);
        progress->heartbeat.store(body[2], std::memory_order_relaxed);
        transport::publish(*progress, body[0]);
      } else if (kind == kFrameData && body.size() == 1) {
        receiveData(reader, body[0]);
      } else if (kind == kFrameGoodbye && body[0] <= kGoodbyeBytesMax &&
                 body[0] <= (body.size() - 1) * 8) {
        throw ConnectionLost("its worker ended the session: " +
                             std::string(reinterpret_cast<const char*>(&body[1]), body[0]));
      } else {
        throw ConnectionLost("the worker sent a frame of unknown kind " + std::to_string(kind));
      }
    }
  }

  // The worker says how many bytes; where they go, only we know.
  void receiveData(Reader& reader, uint64_t bytes) {
    Expected front{};
    {
      const std::lock_guard held(mutex);
      if (expected.empty() || expected.front().bytes != bytes) {
        throw ConnectionLost("the worker sent bytes that nobody asked for");
      }
      front = expected.front();
    }
    reader.read(front.to, bytes);
    {
      const std::lock_guard held(mutex);
      expected.pop_front();
    }
    changed.notify_all();
  }
};

ClientLink::ClientLink(ClientLinkOptions options) : state_(std::make_shared<State>()) {
  using memory::SharedMemory;
  Descriptor up(options.up_fd), down(options.down_fd);
  State& s = *state_;
  s.requests = SharedMemory::create("shoal-requests", transport::ringRegionBytes(wire::kRingBytes));
  s.replies =
      SharedMemory::create("shoal-replies", transport::ringRegionBytes(wire::kReplyRingBytes));
  s.progress_region = SharedMemory::create("shoal-progress", transport::kProgressBytes);
  s.places = SharedMemory::create("shoal-places", transport::kPlacesBytes);
  s.progress = reinterpret_cast<transport::Progress*>(s.progress_region.data());

  s.consumer = std::make_unique<transport::RingConsumer>(s.requests.data(), wire::kRingBytes,
                                                         wire::kMessageBytesMax, s.liveness());

  const int64_t deadline = transport::nowNs() + kGreetingMs * 1000000;
  const Tls tls(options.identity);
  const auto open = [&](Descriptor& fd, Purpose purpose) {
    auto connection = Connection::connect(tls, fd.take(), options.server_name, deadline);
    const Greeting greeting{options.secret, purpose, 0};
    connection->writeBy(&greeting, sizeof greeting, deadline);
    return connection;
  };
  s.up = open(up, Purpose::kUp);
  s.down = open(down, Purpose::kDown);
  for (Connection* connection : {s.up.get(), s.down.get()}) {
    uint64_t answer = 0;
    connection->readBy(&answer, sizeof answer, deadline);
    if (answer != kGreetingAnswer) throw ConnectionLost("the worker did not answer the greeting");
  }
  s.running = 2;
  std::thread([state = state_] { state->run("shoal-up", &State::sendLoop); }).detach();
  std::thread([state = state_] { state->run("shoal-down", &State::receiveLoop); }).detach();
}

ClientLink::~ClientLink() {
  stop();
}

std::vector<int> ClientLink::fds() const {
  const State& s = *state_;
  std::vector<int> fds;
  for (const auto* region : {&s.requests, &s.replies, &s.progress_region, &s.places}) {
    fds.push_back(fcntl(region->fd(), F_DUPFD_CLOEXEC, 0));
  }
  return fds;
}

void ClientLink::awaitSent(uint64_t sequence) {
  State& s = *state_;
  const timespec pause{0, 50000};
  while (s.sent.load(std::memory_order_acquire) < sequence && !s.stopped)
    nanosleep(&pause, nullptr);
  if (!s.stopped) return;
  // It may have stopped in the middle of our memory.
  stop();
}

std::string ClientLink::failure() const {
  if (!state_->stopped || state_->abandoned) return "";
  const std::lock_guard held(state_->mutex);
  return state_->failure;
}

void ClientLink::stop() noexcept {
  State& s = *state_;
  if (s.abandoned || s.up == nullptr || s.down == nullptr) return;  // or never begun
  s.fail("the session was closed");
  std::unique_lock held(s.mutex);
  s.changed.wait(held, [&] { return s.running == 0; });
}

void ClientLink::abandon() noexcept {
  State& s = *state_;
  s.stopped = true;
  s.abandoned = true;  // the lock may be held for ever by a thread that the child does not have
  if (s.up != nullptr) s.up->abandon();
  if (s.down != nullptr) s.down->abandon();
}

}  // namespace shoal::network
