// The client's end of one op stream: appends messages for one member device's worker, and waits for
// its replies. Order and addresses are the session's business; here are only messages.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "client/member/call_cache.h"
#include "client/member/call_lines.h"
#include "client/member/events.h"
#include "client/member/liveness.h"
#include "client/member/observer.h"
#include "client/member/reply_queue.h"
#include "client/member/reported_failures.h"
#include "memory/shared_memory.h"
#include "network/client_link.h"
#include "transport/location_table.h"
#include "transport/progress.h"
#include "transport/ring.h"
#include "wire/messages.h"

namespace shoal::client {

class Members;

struct MemberOptions {
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

class Member {
 public:
  Member(MemberOptions options, Members& members, uint32_t number);
  Member(const Member&) = delete;

  const MemberOptions& options() const { return options_; }
  uint32_t session() const;                    // its number
  uint32_t number() const { return number_; }  // its index in the lease
  uint32_t bit() const { return 1u << number_; }
  const memory::SharedMemory& arena() const { return regions_.arena; }
  const transport::Places& places() const { return *places_; }
  network::ClientLink* link() const { return options_.link.get(); }

  // --- messages. The session's Lock is held.
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
    CallLines::note();
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
  bool idle() const { return completed(sequence_); }
  // Whether the device is past an event that its worker has passed; 0: past all that was sent. The
  // worker of an accelerator has only issued what came before, so it asks the device. The question
  // waits for the calls ahead of it to be issued, not to be done.
  bool devicePast(uint64_t event);
  bool hasFailed() const { return progress_->failed.load(std::memory_order_relaxed) != 0; }
  // Waits until message `sequence` is done. A deleter cannot raise, so it does not hear signals.
  void waitCompleted(uint64_t sequence, bool hears_signals = true);
  // Raises a failure that showed in messages (after, until] and was reported to another thread.
  void raiseReported(uint64_t after, uint64_t until);
  uint64_t lastReported() const { return failures_.last(); }
  // Between two events that the worker has passed.
  Elapsed elapsed(uint64_t start_event, uint64_t end_event);
  // Passes descriptors of shared memory to the worker. Returns the number by which a message names
  // them.
  uint64_t passShared(int memory, int control, int line);
  uint64_t lastSequence() const { return sequence_; }
  Traffic& traffic(const Lock&) { return traffic_; }

  // --- state
  Liveness& liveness() { return liveness_; }
  bool usable() const { return liveness_.usable(); }
  void checkUsable() const { liveness_.checkUsable(); }
  [[noreturn]] void raiseLost(const std::string& reason) { liveness_.raiseLost(reason); }
  // For an owner that outlives the member and must know when its worker is gone.
  memory::SharedMemory takeProgress() { return std::move(regions_.progress); }
  std::string lineOf(uint64_t sequence);  // the user's line that issued a call

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
  [[noreturn]] void raise(wire::ErrorKind kind, const wire::ErrorReply& reply);

  MemberOptions options_;
  Members& members_;
  uint32_t number_;
  Liveness liveness_;
  struct Regions {
    memory::SharedMemory requests, replies, progress, places, arena;
  } regions_;
  transport::Progress* progress_;
  std::unique_ptr<transport::Places> places_;
  std::unique_ptr<transport::RingProducer> requests_;
  std::unique_ptr<ReplyQueue> replies_;
  ReportedFailures failures_;

  uint64_t sequence_ = 0;
  size_t pending_bytes_ = 0;    // of the message that is being written
  bool pending_named_ = false;  // whether that message has a line of its own
  CallLines lines_;
  // Freed addresses that the worker does not know of yet. They go just before the next message, so
  // they need no publication of their own.
  std::vector<wire::Address> unsent_frees_;
  Traffic traffic_;
  uint64_t passed_shared_ = 0;  // shared memories so far
  CallCache cache_;
  std::timed_mutex learning_;
};

}  // namespace shoal::client
