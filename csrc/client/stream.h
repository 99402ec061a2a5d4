// The client's end of one op stream: mints addresses, appends messages, waits for replies. The
// client decides, so nothing here asks the worker before it acts.
#pragma once

#include <c10/core/Device.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "client/call_cache.h"
#include "memory/shared_memory.h"
#include "transport/progress.h"
#include "transport/ring.h"
#include "wire/address.h"
#include "wire/message.h"

namespace shoal::client {

struct StreamOptions {
  int socket = -1;
  int requests_fd = -1, replies_fd = -1, progress_fd = -1, arena_fd = -1;
  uint64_t arena_bytes = 0;   // 0: the device's memory cannot be mapped
  uint64_t memory_bytes = 0;  // what the lease grants
  uint32_t session = 0;
  c10::DeviceIndex index = 0;
  std::string name;    // "cpu", "cuda:0", or what the pool calls it
  bool is_cpu = true;  // the worker computes on CPU
};

struct MemoryUse {
  uint64_t allocated_bytes = 0;
  uint64_t peak_bytes = 0;
  uint64_t limit_bytes = 0;
  uint64_t allocations = 0;
  uint64_t frees = 0;
};

struct Traffic {
  uint64_t messages = 0;
  uint64_t stream_bytes = 0;  // bytes of messages, without the data of transfers
  uint64_t bytes_in = 0;      // host to device
  uint64_t bytes_out = 0;     // device to host
  uint64_t bytes_copied = 0;  // of both, copied by the client itself
  uint64_t round_trips = 0;
};

class Stream {
 public:
  explicit Stream(StreamOptions options);
  ~Stream();
  Stream(const Stream&) = delete;

  const StreamOptions& options() const { return options_; }
  c10::Device device() const { return {c10::DeviceType::PrivateUse1, options_.index}; }

  // --- addresses
  // ----------------------------------------------------------------------------------- A new
  // address for a segment of `bytes` > 0. No memory is behind it yet: that costs no message.
  wire::Address mint(uint64_t bytes);
  void release(wire::Address address) noexcept;
  uint64_t liveSegments() const { return live_segments_.load(std::memory_order_relaxed); }

  // --- messages. A Lock is held from the first word to the last, so that messages stay whole.
  // ------
  using Lock = std::unique_lock<std::mutex>;
  // Notes the user's line for the messages that this thread sends next. Never under a Lock: meeting
  // new code takes the GIL, and who holds the GIL may be about to free a tensor, which takes the
  // Lock.
  static void noteLine();
  Lock lock() { return Lock(mutex_); }
  wire::Address mint(uint64_t bytes, const Lock&);
  // Raises torch.OutOfMemoryError if `bytes` more would exceed what the lease grants.
  void checkRoom(uint64_t bytes, const Lock&) const {
    if (memory_.allocated_bytes + bytes > memory_.limit_bytes) raiseOutOfMemory(bytes);
  }
  // Makes sure that memory is behind the segment at `base`.
  void ensureBound(wire::Address base, const Lock& lock) {
    if (base != 0 && !slots_[wire::slotOf(base)].bound) bind(base, lock);
  }
  void markBound(wire::Address base, const Lock&) { slots_[wire::slotOf(base)].bound = true; }
  // Room for a message of `words` words after the header.
  uint64_t* begin(wire::Kind kind, size_t words, uint16_t flags, const Lock&);
  // Publishes what begin() gave; returns the message's sequence number.
  uint64_t commit(const Lock&);
  uint64_t post(wire::Kind kind, std::initializer_list<uint64_t> words, const Lock& lock);
  uint64_t post(wire::Kind kind, std::initializer_list<uint64_t> words);

  CallCache& cache() { return cache_; }  // under the lock

  // --- replies
  // -------------------------------------------------------------------------------------
  using Payload = std::vector<uint64_t>;
  void countRoundTrip(const Lock&) { ++traffic_.round_trips; }
  // Waits for the reply to message `sequence`; raises what the worker reports.
  Payload await(uint64_t sequence);
  Payload request(wire::Kind kind, std::initializer_list<uint64_t> words);
  void synchronize() { request(wire::Kind::kSync, {}); }
  bool completed(uint64_t sequence) const {
    return progress_->completed.load(std::memory_order_acquire) >= sequence;
  }
  void waitCompleted(uint64_t sequence);
  uint64_t lastSequence() const { return sequence_; }

  // --- transfers
  // ----------------------------------------------------------------------------------- [base, base
  // + bytes) is the segment; the range written is [base + offset, + bytes).
  void upload(wire::Address base, uint64_t offset, const void* from, uint64_t bytes,
              bool non_blocking);
  void download(wire::Address base, uint64_t offset, void* to, uint64_t bytes, bool non_blocking);
  // Gives back a host block once the worker is past `sequence`.
  void releaseHostAfter(uint64_t host_offset, uint64_t sequence);

  // --- state
  // ---------------------------------------------------------------------------------------
  void close() noexcept;
  void abandon() noexcept;  // in a forked child: lets go of the socket, tells nobody
  // Raises DeviceLostError if the worker is gone or the lease has ended.
  void checkUsable() const;
  bool usable() const { return !lost_.load() && !closed_.load(); }
  MemoryUse memoryUse();
  void resetPeak();
  Traffic traffic();
  std::string placeOf(uint64_t sequence);  // the client's own line that issued a call

 private:
  struct Slot {
    uint64_t bytes = 0;
    uint64_t host_block = 0;  // offset + 1 of the host block that the segment lives in; 0: none
    const std::byte* memory = nullptr;  // where we see the segment's bytes, once that is known
    bool bound = false;
    bool live = false;
  };

  void bind(wire::Address base, const Lock& lock);
  uint64_t* reserve(wire::Kind kind, size_t words, uint16_t flags);
  void sendFrees();
  void checkAlive();
  uint32_t takeSlots(uint64_t count);
  void reclaimHost(const Lock&);
  uint64_t stage(const void* from, uint64_t bytes);
  const std::byte* settledMemory(wire::Address base, const Lock&) const;
  void downloadStaged(wire::Address from, void* to, uint64_t bytes);
  const std::byte* locate(wire::Address base, uint64_t offset, uint64_t bytes);
  void markLost(const std::string& reason);
  void countTransfer(uint64_t in, uint64_t out, uint64_t copied);
  [[noreturn]] void raiseOutOfMemory(uint64_t bytes) const;
  [[noreturn]] void raise(wire::ErrorKind kind, const Payload& payload);
  [[noreturn]] void raiseLost(const std::string& reason);

  StreamOptions options_;
  memory::SharedMemory requests_region_, replies_region_, progress_region_, arena_;
  transport::Progress* progress_;
  std::unique_ptr<transport::RingProducer> requests_;
  std::unique_ptr<transport::RingConsumer> replies_;

  std::mutex mutex_;
  uint64_t sequence_ = 0;
  size_t pending_bytes_ = 0;  // of the message that is being written
  bool pending_traced_ = false;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_slots_;
  // Freed addresses that the worker does not know of yet: they go just before the next message,
  // which spares each of them a publication of its own.
  std::vector<wire::Address> unsent_frees_;
  std::map<uint64_t, std::vector<uint32_t>>
      free_runs_;  // segments of several slots, by their count
  uint32_t next_slot_ = 1;
  std::atomic<uint64_t> live_segments_{0};
  MemoryUse memory_;
  Traffic traffic_;
  CallCache cache_;

  struct HostRelease {
    uint64_t offset, sequence;
  };
  std::deque<HostRelease> host_releases_;

  std::mutex reply_mutex_;
  std::unordered_map<uint64_t, std::vector<uint64_t>> stash_;
  std::vector<uint64_t> reply_;

  std::atomic<bool> lost_{false};
  std::atomic<bool> closed_{false};
  std::string lost_reason_;
  std::atomic<uint64_t> heartbeat_seen_{0};
  std::atomic<int64_t> silent_since_ns_{0};  // when the heartbeat last changed while we waited
  std::atomic<int64_t> checked_ns_{0};

  // The lines of the last calls, to name the one that failed. Indexed by sequence number.
  static constexpr size_t kLines = 1 << 14;
  std::array<uint64_t, kLines> lines_{};
};

}  // namespace shoal::client
