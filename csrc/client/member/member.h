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
#include "client/member/request_queue.h"
#include "client/member/traffic.h"
#include "client/settings/program_settings.h"
#include "memory/shared_memory.h"
#include "network/client_link.h"
#include "transport/location_table.h"
#include "transport/progress.h"
#include "wire/messages.h"

namespace shoal::client {

class Members;

struct MemberOptions {
  int socket = -1;
  int requests_fd = -1, replies_fd = -1, progress_fd = -1, locations_fd = -1, arena_fd = -1;
  uint64_t arena_bytes = 0;   // 0: the device's memory cannot be mapped
  uint64_t memory_bytes = 0;  // what the lease grants
  uint64_t spill_bytes = 0;   // what it may have beyond that, in host memory and on disk
  std::string name;           // "cpu", "cuda:0", or what the pool calls it
  bool is_cpu = true;         // the worker computes on CPU
  std::shared_ptr<network::ClientLink> link;  // to a worker on another machine
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
  const transport::LocationTable& locations() const { return *locations_; }
  network::ClientLink* link() const { return options_.link.get(); }

  // --- messages. The session's Lock is held.
  // Appends a message and returns its sequence number.
  template <typename M>
  uint64_t post(const M& message, const Lock& held) {
    return requests_.post(message, held);
  }
  RequestQueue& requests(const Lock&) { return requests_; }
  CallCache& cache() { return cache_; }
  // Before each call: tells the worker what the program has changed in torch since the last one.
  // `precisions`: the call depends on that of float32. May empty the call cache.
  void bringSettings(bool precisions, const Lock& held);
  // Held from a learning call to the kBind that names its outputs: those of the last such call.
  std::timed_mutex& learning() { return learning_; }

  // --- messages, taking the Lock.
  template <typename M>
  uint64_t post(const M& message) {
    return post(message, lockMembers());
  }
  void awaitRoom() { requests_.awaitRoom(); }

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
  bool isDone(uint64_t sequence) const { return transport::isDone(*progress_, sequence); }
  // The same for a caller that asks until it is so. Sends no message.
  bool askDone(uint64_t sequence);
  // The last message that the worker has handed to the device, and the last that the device has
  // finished.
  struct Reached {
    uint64_t issued, done;
  };
  Reached reached() const {
    const uint64_t done = progress_->done.load(std::memory_order_acquire);
    return {transport::issued(*progress_), done};
  }
  bool hasFailed() const { return progress_->failed.load(std::memory_order_relaxed) != 0; }
  // Waits until message `sequence` is done. A deleter cannot raise, so it does not hear signals.
  void waitDone(uint64_t sequence, bool hears_signals = true);
  // Raises a failure that showed in messages (after, until] and was reported to another thread.
  void raiseReported(uint64_t after, uint64_t until);
  uint64_t lastReported() const { return failures_.last(); }
  // Between two events that the worker has passed.
  Elapsed elapsed(uint64_t start_event, uint64_t end_event);
  // Passes descriptors of shared memory to the worker. Returns the number by which a message names
  // them.
  uint64_t passShared(int memory, int control, int line);
  uint64_t lastSequence() const { return requests_.lastSequence(); }
  Traffic& traffic(const Lock&) { return traffic_; }

  // --- state
  Liveness& liveness() { return liveness_; }
  bool usable() const { return liveness_.usable(); }
  void checkUsable() const { liveness_.checkUsable(); }
  [[noreturn]] void raiseLost(const std::string& reason) { liveness_.raiseLost(reason); }
  // For an owner that outlives the member and must know when its worker is gone.
  memory::SharedMemory takeProgress() { return std::move(regions_.progress); }

 private:
  Lock lockMembers() const;
  template <typename M>
  uint64_t postCounted(const M& message) {
    const Lock held = lockMembers();
    ++traffic_.round_trips;
    return post(message, held);
  }
  std::string lineOf(uint64_t sequence);  // the user's line that issued a call
  [[noreturn]] void raise(wire::ErrorKind kind, const wire::ErrorReply& reply);

  MemberOptions options_;
  Members& members_;
  uint32_t number_;
  Liveness liveness_;
  struct Regions {
    explicit Regions(const MemberOptions& options);
    memory::SharedMemory requests, replies, progress, locations, arena;
  } regions_;
  transport::Progress* progress_;
  std::unique_ptr<transport::LocationTable> locations_;
  Traffic traffic_;
  RequestQueue requests_;
  ReplyQueue replies_;
  ReportedFailures failures_;
  uint64_t passed_shared_ = 0;  // shared memories so far
  CallCache cache_;
  ProgramSettings settings_;
  std::timed_mutex learning_;
};

}  // namespace shoal::client
