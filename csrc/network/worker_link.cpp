#include "network/worker_link.h"

#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "network/frames.h"
#include "network/lane.h"
#include "network/order.h"
#include "network/reader.h"
#include "network/staging.h"
#include "transport/ring.h"
#include "wire/limits.h"
#include "wire/reader.h"

namespace shoal::network {
namespace {

// Between two looks whether the executor has taken pieces. It has many before it: no hurry.
constexpr int64_t kPauseNs = 100000;
// Between two frames that say only how far we are: a frame costs both machines more than a small
// operator. Replies, the bytes of copies and events, which somebody may wait for, are told at once;
// copies in, whose memory somebody wants back, soon.
constexpr int64_t kProgressNs = 5000000, kProgressOfCopiesNs = 1000000;
constexpr int64_t kReplySpinNs = 30000;
constexpr size_t kBatchWords = 16 * 1024;

class Link {
 public:
  Link(WorkerLinkOptions options, std::vector<std::unique_ptr<Connection>> up,
       std::vector<std::unique_ptr<Connection>> down)
      : options_(std::move(options)),
        up_(std::move(up[0])),
        down_(std::move(down[0])),
        requests_(options_.requests, wire::kRingBytes, [] {}),
        replies_(options_.replies, wire::kReplyRingBytes, wire::kMessageBytesMax, [] {}) {
    for (size_t i = 1; i < up.size(); ++i) {
      up_lanes_.push_back(std::make_unique<Lane>(std::move(up[i]), Lane::Direction::kReceive));
    }
    for (size_t i = 1; i < down.size(); ++i) {
      down_lanes_.push_back(std::make_unique<Lane>(std::move(down[i]), Lane::Direction::kSend));
    }
  }

  // Starts the threads. They live as long as the process.
  void start() {
    startThread("shoal-up", [this] { receive(); });
    startThread("shoal-down", [this] { send(); });
    for (const Lanes* lanes : {&up_lanes_, &down_lanes_}) {
      for (const auto& lane : *lanes) {
        startThread("shoal-lane", [this, &lane = *lane] { carry(lane); });
      }
    }
  }

 private:
  static void startThread(const char* name, std::function<void()> loop) {
    std::thread([name, loop = std::move(loop)] {
      prctl(PR_SET_NAME, name);
      loop();
    }).detach();
  }

  void carry(Lane& lane) {
    try {
      lane.run();
    } catch (const std::exception&) {
      if (!ended_) _exit(0);  // the client is gone; else the sender has something to say first
    }
  }

  void receive() {
    try {
      receiveLoop();
    } catch (const wire::ProtocolError& error) {
      std::fprintf(stderr, "shoal worker %s: the session ends: %s\n", options_.name.c_str(),
                   error.what());
      goodbye_ = error.what();
      ended_.store(true, std::memory_order_release);  // the sender says it, and ends the process
    } catch (const std::exception&) {
      _exit(0);  // the client is gone
    }
  }

  void send() {
    try {
      sendLoop();
    } catch (const std::exception&) {
    }
    _exit(ended_ ? 1 : 0);
  }

  struct CopyOut {
    uint64_t sequence, offset, bytes;
  };
  struct EventRecord {
    uint64_t sequence, event;
  };

  uint64_t completed() const {
    return options_.progress->completed.load(std::memory_order_acquire);
  }

  // --- up

  void receiveLoop() {
    Reader reader(*up_);  // waits for ever: the kernel asks whether the client's machine is there
    std::vector<uint64_t> message;
    uint64_t sequence = 0;
    while (true) {
      const uint64_t header = reader.word();
      const size_t bytes = wire::headerBytes(header);
      const uint16_t kind = wire::headerKind(header);
      if (bytes < 8 || bytes % 8 != 0 || bytes > wire::kMessageBytesMax) {
        throw wire::ProtocolError("a message of " + std::to_string(bytes) +
                                  " bytes is out of range");
      }
      if (kind == 0 || kind > static_cast<uint16_t>(wire::Kind::kLast)) {
        throw wire::ProtocolError("message kind " + std::to_string(kind) + " does not exist");
      }
      message.resize(bytes / 8);
      message[0] = header;
      reader.read(message.data() + 1, bytes - 8);
      ++sequence;
      switch (static_cast<wire::Kind>(kind)) {
        case wire::Kind::kAdopt:
          throw wire::ProtocolError("host memory of another machine cannot be adopted");
        case wire::Kind::kCopyIn:
          takeIn(reader, message, sequence);
          break;
        case wire::Kind::kCopyOut:
          message[3] = takeOut(pieceOf(message), sequence);
          break;
        case wire::Kind::kEventRecord:
          if (message.size() == 2) expectEvent({sequence, message[1]});
          break;
        default:
          break;
      }
      if (arriving_.quiet()) {
        publish(message, sequence);
      } else {
        arriving_.then(bytes, [this, message, sequence] { publish(message, sequence); });
      }
    }
  }

  void publish(const std::vector<uint64_t>& message, uint64_t sequence) {
    const size_t bytes = message.size() * 8;
    uint64_t* words = requests_.reserve(bytes);
    std::copy(message.begin(), message.end(), words);
    requests_.commit(bytes);
    received_.store(sequence, std::memory_order_relaxed);
    if (resting_.load(std::memory_order_relaxed)) replies_.nudge();
  }

  static uint64_t pieceOf(const std::vector<uint64_t>& message) {
    if (message.size() != 4 || message[2] == 0 || message[2] > kPieceBytes) {
      throw wire::ProtocolError("a transfer between machines is no piece of at most " +
                                std::to_string(kPieceBytes) + " bytes");
    }
    return message[2];
  }

  // Finds a place for the bytes of a kCopyIn; they come now, or by a lane.
  void takeIn(Reader& reader, std::vector<uint64_t>& message, uint64_t sequence) {
    const uint64_t bytes = pieceOf(message);
    const uint64_t lane = message[3];
    if (lane > up_lanes_.size()) {
      throw wire::ProtocolError("there is no lane " + std::to_string(lane));
    }
    std::optional<uint64_t> place;
    while (!(place = in_.take(bytes, sequence))) {
      in_.release(completed());
      if ((place = in_.take(bytes, sequence))) break;
      const timespec pause{0, kPauseNs};
      nanosleep(&pause, nullptr);
    }
    message[3] = *place;
    last_in_.store(sequence, std::memory_order_relaxed);
    if (lane == 0) return reader.read(options_.staging + *place, bytes);
    const uint64_t ticket = arriving_.expect();
    up_lanes_[lane - 1]->push(
        {options_.staging + *place, bytes, [this, ticket] { arriving_.arrived(ticket); }});
  }

  uint64_t takeOut(uint64_t bytes, uint64_t sequence) {
    std::optional<uint64_t> place;
    std::unique_lock held(mutex_);
    released_.wait(held, [&] { return (place = out_.take(bytes, sequence)).has_value(); });
    copies_.push_back({sequence, *place, bytes});
    return *place;
  }

  // Of more than there are moments the oldest are forgotten, as they are in the progress page.
  void expectEvent(EventRecord record) {
    const std::lock_guard held(mutex_);
    events_.push_back(record);
    if (events_.size() > transport::kMoments) events_.pop_front();
  }

  // --- down

  void sendLoop() {
    std::vector<uint64_t> reply;
    std::vector<uint64_t> batch;
    int64_t told_at = 0;
    while (true) {
      const uint64_t done = completed();
      bool urgent = sendCopies(done, batch);
      urgent |= sendMoments(done, batch);
      while (replies_.poll(reply)) {
        // Who has the reply must find its request done, and the bytes of all before it there.
        sendCopies(reply[1], batch);
        sendMoments(reply[1], batch);
        sayProgress(reply[1], false, batch);
        batch.insert(batch.end(), reply.begin(), reply.end());
        urgent = true;
        if (batch.size() > kBatchWords) write(batch);
      }
      const bool failed = options_.progress->failed.load(std::memory_order_relaxed) != 0;
      const bool beat = options_.progress->heartbeat.load(std::memory_order_relaxed) != told_beat_;
      const bool news = done > told_ || failed != told_failed_;
      const bool copied = told_ < last_in_.load(std::memory_order_relaxed);
      const int64_t now = transport::nowNs();
      const int64_t quiet_ns = copied ? kProgressOfCopiesNs : kProgressNs;
      if (urgent || beat || (news && now - told_at >= quiet_ns)) {
        sayProgress(std::max(done, told_), failed, batch);
        write(batch);
        down_->flush();
        told_at = now;
        continue;
      }
      if (ended_.load(std::memory_order_acquire)) return sayGoodbye();
      rest(news || done < received_.load(std::memory_order_relaxed), now - told_at < kReplySpinNs);
    }
  }

  void sayProgress(uint64_t done, bool failed, std::vector<uint64_t>& batch) {
    told_ = done;
    told_failed_ = failed;
    told_beat_ = options_.progress->heartbeat.load(std::memory_order_relaxed);
    batch.insert(batch.end(), {frameWord(kFrameProgress, 32), done, failed ? 1u : 0u, told_beat_});
  }

  // Who was just told something may have an answer, and wait for ours.
  void rest(bool busy, bool just_told) {
    if (just_told && replies_.spin(kReplySpinNs / 1000)) return;
    resting_.store(!busy, std::memory_order_relaxed);
    replies_.sleep(busy ? 1 : transport::kHeartbeatMs / 2);
    resting_.store(false, std::memory_order_relaxed);
  }

  // The bytes of all transfers up to message `sequence`, which are done.
  bool sendCopies(uint64_t sequence, std::vector<uint64_t>& batch) {
    bool any = false;
    while (true) {
      CopyOut copy{};
      {
        const std::lock_guard held(mutex_);
        if (copies_.empty() || copies_.front().sequence > sequence) return any;
        copy = copies_.front();
        copies_.pop_front();
      }
      any = true;
      std::byte* data = options_.staging + copy.offset;
      const uint32_t lane = chooseLane(down_lanes_, copy.bytes);
      batch.insert(batch.end(), {frameWord(kFrameData, 24), copy.bytes, lane});
      if (lane > 0) {
        const uint64_t ticket = leaving_.expect();
        Lane::Piece piece{data, copy.bytes, [this, ticket] { leaving_.arrived(ticket); }};
        if (!down_lanes_[lane - 1]->tryPush(piece)) {
          write(batch);  // a client that does not know of pieces does not take them
          down_->flush();
          down_lanes_[lane - 1]->push(std::move(piece));
        }
      } else {
        write(batch);
        down_->write(data, copy.bytes);
      }
      leaving_.thenLatest([this, sequence = copy.sequence] {
        {
          const std::lock_guard held(mutex_);
          out_.release(sequence);
        }
        released_.notify_one();
      });
    }
  }

  // When the events up to message `sequence`, which is done, were passed. Before the progress that
  // says so: the time between two is then known wherever it is asked for.
  bool sendMoments(uint64_t sequence, std::vector<uint64_t>& batch) {
    const std::lock_guard held(mutex_);
    bool any = false;
    for (; !events_.empty() && events_.front().sequence <= sequence; events_.pop_front()) {
      any = true;
      const uint64_t event = events_.front().event;
      if (const auto passed = transport::passed(*options_.progress, event)) {
        batch.insert(batch.end(),
                     {frameWord(kFrameMoment, 32), event, static_cast<uint64_t>(passed->ns),
                      static_cast<uint64_t>(passed->waited_ns)});
      }
    }
    return any;
  }

  void write(std::vector<uint64_t>& batch) {
    if (!batch.empty()) down_->write(batch.data(), batch.size() * 8);
    batch.clear();
  }

  void sayGoodbye() {
    const std::string text = goodbye_.substr(0, kGoodbyeBytesMax);
    std::vector<uint64_t> frame(2 + (text.size() + 7) / 8);
    frame[0] = frameWord(kFrameGoodbye, static_cast<uint32_t>(frame.size() * 8));
    frame[1] = text.size();
    std::copy(text.begin(), text.end(), reinterpret_cast<char*>(frame.data() + 2));
    write(frame);
    down_->flush();
  }

  WorkerLinkOptions options_;
  std::unique_ptr<Connection> up_, down_;
  Lanes up_lanes_, down_lanes_;
  Order arriving_{kHeldBytesMax}, leaving_{kHeldBytesMax};
  transport::RingProducer requests_;
  transport::RingConsumer replies_;
  std::atomic<uint64_t> received_{0}, last_in_{0};  // messages: the last, the last kCopyIn
  std::atomic<bool> resting_{false}, ended_{false};
  std::string goodbye_;
  uint64_t told_ = 0, told_beat_ = 0;  // what the client knows; the sender's alone
  bool told_failed_ = false;
  Staging in_{0, kStagingBytes};  // the receiver's alone
  std::mutex mutex_;
  std::condition_variable released_;  // of out_
  Staging out_{kStagingBytes, kStagingBytes};
  std::deque<CopyOut> copies_;
  std::deque<EventRecord> events_;  // that were not passed yet, or not told
};

}  // namespace

uint64_t stagingRegionBytes() {
  return 2 * kStagingBytes;
}

void serveLink(WorkerLinkOptions options, std::vector<std::unique_ptr<Connection>> up,
               std::vector<std::unique_ptr<Connection>> down) {
  (new Link(std::move(options), std::move(up), std::move(down)))->start();  // for ever
}

}  // namespace shoal::network
