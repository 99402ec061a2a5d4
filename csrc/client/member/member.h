// The client's end of one op stream: appends messages for one member device's worker, and waits for
// its replies. Order and addresses are the session's business; here are only messages.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "client/member/call_cache.h"
#include "client/member/errors.h"
#include "client/member/events.h"
#include "client/member/observer.h"
#include "memory/shared_memory.h"
#include "network/client_link.h"
#include "transport/location_table.h"
#include "transport/progress.h"
#include "transport/ring.h"
#include "wire/messages.h"

namespace shoal::client {

class Members;

struct StreamOptions {
  int socket = -1;
  int requests_fd = -1, replies_fd = -1, progress_fd = -1, places_fd = -1, arena_fd = -1;
  uint64_t arena_bytes = 0;   // 0: the device's memory cannot be mapped
  uint64_t memory_bytes = 0;  // what the lease grants
  uint64_t spill_bytes = 0;   // what it may have beyond that, in host memory and on disk
  std::string name;           // "cpu", "cuda:0", or what the pool calls it
  bool is_cpu = true;         // the worker computes on CPU
  std::shared_ptr<network::ClientLink> link;  // to a worker on another machine
};

struct Traffic {
  uint64_t messages = 0;
  uint64_t stream_bytes = 0;  // bytes of messages, without the data of transfers
  uint64_t bytes_in = 0;      // host to device
  uint64_t bytes_out = 0;     // device to host
  uint64_t bytes_copied = 0;  // of both, copied by the client itself
  uint64_t bytes_peer = 0;    // from other member devices
  uint64_t bytes_node = 0;    // from files at the device's node
  uint64_t round_trips = 0;
};

class Stream {
 public:
  Stream(StreamOptions options, Members& members, uint32_t member);
  ~Stream();
  Stream(const Stream&) = delete;

  const StreamOptions& options() const { return options_; }
  uint32_t session() const;                    // its number
  uint32_t member() const { return member_; }  // its place in the lease
  uint32_t bit() const { return 1u << member_; }
  const memory::SharedMemory& arena() const { return arena_; }
  const transport::Places& places() const { return *places_; }
  network::ClientLink* link() const { return options_.link.get(); }

  // --- messages. The session's Lock is held.
  // Notes the user's line for the messages that this thread sends next. Never under a Lock: meeting
  // new code takes the GIL, and who holds the GIL may be about to free a tensor, which takes the
  // Lock.
  static void noteLine();
  // The noted line, and noting one that was noted before.
  static uint64_t line();
  static void setLine(uint64_t token);
  // Appends a message and returns its sequence number.
  template <typename M>
  uint64_t post(const M& message, const Lock& held) {
    wire::write(message, begin(M::kKind, wire::wordsOf(message), wire::flagsOf(message)));
    return commit(held);
  }
  // The sequence number of the next message that is posted, for messages that name each other.
  uint64_t nextSequence(const Lock&);
  // Frees travel in batches before the next message; a large one goes at once.
  void free(wire::Address address, bool now, const Lock&);
  CallCache& cache() { return cache_; }
  // Held from a learning call to the kBind that names its outputs: those of the last such call.
  std::timed_mutex& learning() { return learning_; }

  // --- messages, taking the Lock.
  template <typename M>
  uint64_t post(const M& message) {
    return post(message, lockMembers());
  }
  // Waits until the worker has taken most of what was sent, so that nobody waits for it while
  // holding the Lock.
  void awaitRoom() {
    if (!requests_->hasRoom()) waitForRoom();
  }

  // --- replies
  using Payload = std::vector<uint64_t>;
  // Waits for the reply to message `sequence`; raises what the worker reports.
  Payload await(uint64_t sequence);
  // Posts a message and waits for its reply. The payload is a wire::…Reply.
  template <typename M>
  Payload request(const M& message) {
    noteLine();
    return await(postCounted(message));
  }
  // The same for a reply that holds numbers only.
  template <typename M>
  typename M::Reply ask(const M& message) {
    const Payload payload = request(message);
    try {
      return wire::readBody<typename M::Reply>(payload);
    } catch (const wire::ProtocolError& error) {
      raiseLost(std::string("it sent a malformed reply: ") + error.what());
    }
  }
  void synchronize() { request(wire::Sync{}); }
  bool completed(uint64_t sequence) const {
    return progress_->completed.load(std::memory_order_acquire) >= sequence;
  }
  uint64_t completedSequence() const {
    return progress_->completed.load(std::memory_order_acquire);
  }
  bool idle() const { return completed(sequence_); }
  // Whether the device is past an event that its worker has passed; 0: past all that was sent. The
  // worker of an accelerator has only issued what came before, so it asks the device. The question
  // waits for the calls ahead of it to be issued, not to be done.
  bool devicePast(uint64_t event);
  bool hasFailed() const { return progress_->failed.load(std::memory_order_relaxed) != 0; }
  // Waits until message `sequence` is done. A deleter cannot raise, so it does not hear signals.
  void waitCompleted(uint64_t sequence, bool hears_signals = true);
  // A failure is told once, with the next reply, to whichever thread gets it. Others learn of it by
  // this: raises a failure that showed in messages (after, until], if one was told.
  void raiseTold(uint64_t after, uint64_t until);
  // The last message of which it was told that a failure showed in it; 0: none.
  uint64_t lastTold() const { return last_told_.load(std::memory_order_acquire); }
  // Between two events that the worker has passed.
  Elapsed elapsed(uint64_t start_event, uint64_t end_event);
  // Raises DeviceLostError if the worker is gone, for those who read its memory without a message.
  // Looks at most every 50 ms.
  void checkSometimes() {
    checkUsable();
    if (transport::nowNs() - checked_ns_.load(std::memory_order_relaxed) > kCheckNs) checkAlive();
  }
  // Passes descriptors of shared memory to the worker. Returns the number by which a message names
  // them.
  uint64_t passShared(int memory, int control, int line);
  uint64_t lastSequence() const { return sequence_; }
  Traffic& traffic(const Lock&) { return traffic_; }

  // --- state
  // Workers of the lease on this machine wait for this one no more, unless it shows signs of life:
  // for who knows sooner than they that it does not go on.
  void giveUp() { transport::giveUp(*progress_); }
  void close() noexcept;
  void abandon() noexcept;  // in a forked child: lets go of the socket, tells nobody
  // Raises DeviceLostError if the worker is gone or the lease has ended.
  void checkUsable() const;
  bool usable() const { return lost_.load() == nullptr && !closed_.load(); }
  [[noreturn]] void raiseLost(const std::string& reason, Seen seen = Seen::kBroken);
  // Why the device is lost, as the pool says: for every error from now on.
  void tellLost(const std::string& reason);
  // For who outlives the stream and has to know when its worker is gone.
  memory::SharedMemory takeProgress() { return std::move(progress_region_); }
  std::string placeOf(uint64_t sequence);  // the client's own line that issued a call

 private:
  // Room for a message of `words` words after the header.
  uint64_t* begin(wire::Kind kind, size_t words, uint16_t flags);
  uint64_t* reserve(wire::Kind kind, size_t words, uint16_t flags);
  // Publishes what begin() gave.
  uint64_t commit(const Lock&);
  Lock lockMembers() const;
  template <typename M>
  uint64_t postCounted(const M& message) {
    const Lock held = lockMembers();
    ++traffic_.round_trips;
    return post(message, held);
  }
  void sendFrees();
  void waitForRoom();
  // Takes the reply to `sequence`, if it comes within 50 ms.
  bool awaitSlice(uint64_t sequence, Payload& payload, wire::ErrorKind& error);
  void dropReply(uint64_t sequence);
  struct Told {
    wire::ErrorKind kind;
    Payload payload;
  };
  void remember(uint64_t shown_in, Told told);
  void checkAlive();
  void markLost(const std::string& reason, Seen seen);
  [[noreturn]] void raise(wire::ErrorKind kind, const wire::ErrorReply& reply);

  StreamOptions options_;
  Members& members_;
  uint32_t member_;
  memory::SharedMemory requests_region_, replies_region_, progress_region_, places_region_, arena_;
  transport::Progress* progress_;
  std::unique_ptr<transport::Places> places_;
  std::unique_ptr<transport::RingProducer> requests_;
  std::unique_ptr<transport::RingConsumer> replies_;

  uint64_t sequence_ = 0;
  size_t pending_bytes_ = 0;  // of the message that is being written
  bool pending_traced_ = false;
  // Freed addresses that the worker does not know of yet: they go just before the next message,
  // which spares each of them a publication of its own.
  std::vector<wire::Address> unsent_frees_;
  Traffic traffic_;
  uint64_t passed_shared_ = 0;  // shared memories so far
  CallCache cache_;
  std::timed_mutex learning_;

  std::timed_mutex reply_mutex_;
  std::unordered_map<uint64_t, std::vector<uint64_t>> stash_;
  std::vector<uint64_t> reply_;
  std::unordered_set<uint64_t> unwanted_;  // messages whose wait was interrupted: no reply is kept

  std::mutex told_mutex_;
  std::map<uint64_t, Told> told_;  // the latest ones, by the message in which they showed
  std::atomic<uint64_t> last_told_{0};

  // Both are set once and then only read, by any thread, also in a forked child.
  struct Loss {
    std::string reason;
    Seen seen;
  };
  std::atomic<const Loss*> lost_{nullptr};
  std::atomic<const std::string*> told_reason_{nullptr};  // by the pool
  std::atomic<bool> closed_{false};
  std::atomic<uint64_t> heartbeat_seen_{0};
  std::atomic<int64_t> silent_since_ns_{0};  // when the heartbeat last changed while we waited
  std::atomic<int64_t> checked_ns_{0};

  static constexpr int64_t kCheckNs = 50000000;
  // The lines of the last calls, to name the one that failed. Indexed by sequence number.
  static constexpr size_t kLines = 1 << 14;
  std::array<uint64_t, kLines> lines_{};
};

}  // namespace shoal::client
