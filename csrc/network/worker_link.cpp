#include "network/worker_link.h"

#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "network/due_reports.h"
#include "network/frames.h"
#include "network/in_order.h"
#include "network/lane.h"
#include "network/staging.h"
#include "network/tls/socket_reader.h"
#include "transport/ending.h"
#include "transport/ring.h"
#include "wire/limits.h"

namespace shoal::network {
namespace {

// Between two checks whether the executor has taken chunks. It has many queued: no hurry.
constexpr int64_t kPauseNs = 100000;
// Between two frames that report progress only: a frame costs both machines more than a small
// operator. The link sends replies, the bytes of copies and events at once, because the client may
// wait for them. It reports copies in soon, because the client wants their memory back.
constexpr int64_t kProgressMs = 20, kProgressOfCopiesMs = 1;
constexpr int64_t kReplySpinUs = 30;
constexpr size_t kBatchWords = 16 * 1024;

class Link {
 public:
  Link(WorkerLinkOptions options, std::vector<std::unique_ptr<Connection>> up,
       std::vector<std::unique_ptr<Connection>> down)
      : options_(std::move(options)),
        up_(std::move(up[0])),
        down_(std::move(down[0])),
        requests_(options_.requests, wire::kRingBytes, [] {}),
        replies_(options_.replies, wire::kReplyRingBytes, wire::kMessageBytesMax, [] {}),
        due_(*options_.progress) {
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
    } catch (const std::exception& error) {
      if (!ended_) endWithout(error);  // else the sender sends the reason first
    }
  }

  void receive() {
    try {
      receiveLoop();
    } catch (const wire::ProtocolError& error) {
      transport::logError(std::string("the session ends: ") + error.what());
      goodbye_ = error.what();
      ended_.store(true, std::memory_order_release);  // the sender sends it, and ends the process
      transport::ringForAll(*options_.progress);
    } catch (const std::exception& error) {
      endWithout(error);
    }
  }

  // The client is gone.
  [[noreturn]] static void endWithout(const std::exception& error) {
    const auto* lost = dynamic_cast<const ConnectionLost*>(&error);
    const bool silent = lost != nullptr && lost->cause() == ConnectionLost::Cause::kSilent;
    transport::endProcess(silent ? transport::Ending::kClientSilent
                                 : transport::Ending::kClientClosed);
  }

  void send() {
    try {
      sendLoop();
    } catch (const std::exception& error) {
      if (!ended_) endWithout(error);
    }
    transport::endProcess(transport::Ending::kFailed, goodbye_);
  }

  uint64_t done() const { return options_.progress->done.load(std::memory_order_acquire); }

  // --- up

  void receiveLoop() {
    Reader reader(*up_);  // waits for ever: TCP probes the client's machine
    std::vector<uint64_t> message;
    uint64_t sequence = 0;
    while (true) {
      reader.message(message, "a message", 8);
      const uint16_t kind = wire::headerKind(message[0]);
      if (kind == 0 || kind >= wire::kKindsEnd) {
        throw wire::ProtocolError("message kind " + std::to_string(kind) + " does not exist");
      }
      ++sequence;
      if (wire::expectsReply(static_cast<wire::Kind>(kind), wire::headerFlags(message[0]))) {
        due_.addReply(sequence);
      }
      using Seen = wire::MessageList<wire::Adopt, wire::CopyIn, wire::CopyOut, wire::EventRecord>;
      Seen::decode(
          message,
          wire::Overloaded{
              [](const wire::Adopt&) {
                throw wire::ProtocolError("host memory of another machine cannot be adopted");
              },
              [&](wire::CopyIn copy) {
                copy.host = takeIn(reader, copy, sequence);
                replace(message, copy);
              },
              [&](wire::CopyOut copy) {
                checkChunk(copy.bytes);
                copy.host = due_.addCopy(copy.bytes, sequence);
                replace(message, copy);
              },
              [&](const wire::EventRecord& record) { due_.addEvent(record.event, sequence); },
          });
      if (arriving_.quiet()) {
        publish(message, sequence);
      } else {
        arriving_.then(message.size() * 8,
                       [this, message, sequence] { publish(message, sequence); });
      }
    }
  }

  void publish(const std::vector<uint64_t>& message, uint64_t sequence) {
    const size_t bytes = message.size() * 8;
    uint64_t* words = requests_.reserve(bytes);
    std::copy(message.begin(), message.end(), words);
    requests_.commit(bytes);
    received_ = sequence;
    // Now that there is work, the sender's sleep is too long.
    if (idle_) transport::ringForAll(*options_.progress);
  }

  static void replace(std::vector<uint64_t>& message, const auto& by) {
    message.clear();
    wire::append(message, by);
  }

  static void checkChunk(uint64_t bytes) {
    if (bytes > 0 && bytes <= kChunkBytes) return;
    throw wire::ProtocolError("a transfer between machines carries chunks of 1 to " +
                              std::to_string(kChunkBytes) + " bytes");
  }

  // Finds memory for the bytes of a copy; they come now, or by a lane. Returns its offset.
  uint64_t takeIn(Reader& reader, const wire::CopyIn& copy, uint64_t sequence) {
    const uint64_t bytes = copy.bytes;
    const uint64_t lane = copy.host;
    checkChunk(bytes);
    if (lane > up_lanes_.size()) {
      throw wire::ProtocolError("there is no lane " + std::to_string(lane));
    }
    std::optional<uint64_t> offset;
    while (!(offset = in_.take(bytes, sequence))) {
      in_.release(done());
      if ((offset = in_.take(bytes, sequence))) break;
      transport::ask(*options_.progress, sequence - 1);
      const timespec pause{0, kPauseNs};
      nanosleep(&pause, nullptr);
    }
    last_in_.store(sequence, std::memory_order_relaxed);
    std::byte* to = options_.staging + *offset;
    if (lane == 0) {
      reader.read(to, bytes);
    } else {
      const uint64_t ticket = arriving_.expect();
      up_lanes_[lane - 1]->push({to, bytes, [this, ticket] { arriving_.arrived(ticket); }});
    }
    return *offset;
  }

  // --- down

  void sendLoop() {
    std::vector<uint64_t> reply;
    std::vector<uint64_t> batch;
    int64_t told_at = 0;
    while (true) {
      const uint64_t done = this->done();
      bool urgent = sendCopies(done, batch);
      urgent |= sendMoments(done, batch);
      while (replies_.poll(reply)) {
        const uint64_t replied_to = wire::read<wire::Reply>(reply).sequence;
        due_.replied(replied_to);
        // A client that has the reply must find its request done, and all bytes before it there. (A
        // device that runs late answers some questions earlier.)
        const uint64_t reached = std::min(replied_to, this->done());
        sendCopies(reached, batch);
        sendMoments(reached, batch);
        sayProgress(std::max(reached, told_.done), false, batch);
        batch.insert(batch.end(), reply.begin(), reply.end());
        urgent = true;
        if (batch.size() > kBatchWords) write(batch);
      }
      const bool failed = options_.progress->failed.load(std::memory_order_relaxed) != 0;
      const bool beat =
          options_.progress->heartbeat.load(std::memory_order_relaxed) != told_.heartbeat;
      const bool news = done > told_.done || failed != (told_.failed != 0);
      const bool copied = told_.done < last_in_.load(std::memory_order_relaxed);
      const int64_t now = nowNs();
      const int64_t quiet_ms = copied ? kProgressOfCopiesMs : kProgressMs;
      if (urgent || beat || (news && now - told_at >= quiet_ms * 1000000)) {
        sayProgress(std::max(done, told_.done), failed, batch);
        write(batch);
        down_->flush();
        told_at = now;
        spins_ = urgent;
        continue;
      }
      if (ended_.load(std::memory_order_acquire)) return sayGoodbye();
      rest(news ? quiet_ms : 0);
    }
  }

  void sayProgress(uint64_t done, bool failed, std::vector<uint64_t>& batch) {
    const uint64_t beat = options_.progress->heartbeat.load(std::memory_order_relaxed);
    told_ = {done, failed ? 1u : 0u, beat};
    wire::append(batch, told_);
  }

  // Waits until there is something to send. `news_ms`: how long present news may wait; 0: no news.
  void rest(int64_t news_ms) {
    // A client that just got something may answer, and wait for the next reply.
    if (std::exchange(spins_, false) && replies_.spin(kReplySpinUs)) return;
    const uint32_t bell = options_.progress->bell.load(std::memory_order_seq_cst);
    idle_ = news_ms == 0 && done() >= received_;
    const auto [next, is_reply] = due_.sleepForNext();
    if (is_reply && done() >= next) {
      replies_.sleep(1);  // the executor is just about to put it there
    } else if (!ended_) {
      const int64_t most_ms = news_ms > 0 ? news_ms : kProgressMs;
      transport::sleepUntilRung(*options_.progress, bell, next,
                                idle_ ? transport::kHeartbeatMs / 2 : most_ms);
    }
    idle_ = false;
    due_.wokeUp();
  }

  // Sends the bytes of all transfers up to message `sequence`. They are done.
  bool sendCopies(uint64_t sequence, std::vector<uint64_t>& batch) {
    bool any = false;
    while (const auto copy = due_.takeCopy(sequence)) {
      any = true;
      std::byte* data = options_.staging + copy->offset;
      const uint32_t lane = chooseLane(down_lanes_, copy->bytes);
      wire::append(batch, DataFrame{copy->bytes, lane});
      if (lane > 0) {
        const uint64_t ticket = leaving_.expect();
        Lane::Chunk chunk{data, copy->bytes, [this, ticket] { leaving_.arrived(ticket); }};
        if (!down_lanes_[lane - 1]->tryPush(chunk)) {
          write(batch);  // a client takes chunks only after it knows of them
          down_->flush();
          down_lanes_[lane - 1]->push(std::move(chunk));
        }
      } else {
        write(batch);
        down_->write(data, copy->bytes);
      }
      leaving_.thenLatest([this, done = copy->sequence] { due_.release(done); });
    }
    return any;
  }

  // Sends the times of the events up to message `sequence`, which is done. They go before the
  // progress that says so: then the client knows the time between two events when it asks.
  bool sendMoments(uint64_t sequence, std::vector<uint64_t>& batch) {
    bool any = false;
    while (const auto event = due_.takeEvent(sequence)) {
      any = true;
      if (const auto passed = transport::passed(*options_.progress, *event)) {
        wire::append(batch, MomentFrame{*event, passed->ns, passed->waited_ns});
      }
    }
    return any;
  }

  void write(std::vector<uint64_t>& batch) {
    if (!batch.empty()) down_->write(batch.data(), batch.size() * 8);
    batch.clear();
  }

  void sayGoodbye() {
    std::vector<uint64_t> frame;
    const std::string_view text = goodbye_;
    wire::append(frame, GoodbyeFrame{text.substr(0, GoodbyeFrame::kTextBytesMax)});
    write(frame);
    down_->flush();
  }

  WorkerLinkOptions options_;
  std::unique_ptr<Connection> up_, down_;
  Lanes up_lanes_, down_lanes_;
  Order arriving_{kHeldBytesMax}, leaving_{kHeldBytesMax};
  transport::RingProducer requests_;
  transport::RingConsumer replies_;
  std::atomic<uint64_t> received_{0}, last_in_{0};  // messages: the last, the last CopyIn
  std::atomic<bool> idle_{false}, ended_{false};    // idle: the sender sleeps for long
  bool spins_ = false;                              // only the sender uses it
  std::string goodbye_;
  ProgressFrame told_;            // what the client knows; only the sender uses it
  Staging in_{0, kStagingBytes};  // only the receiver uses it
  DueReports due_;
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
