// Finds out what a device that runs late has done, and tells it: a thread of the worker that may
// wait for the device. The thread that issues work never does. It waits only where somebody asks;
// else it looks now and then. What the device reports then ends the session: the loops throw it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "transport/progress.h"
#include "worker/accelerator/late.h"
#include "worker/process/late_reads.h"
#include "worker/process/ring_replies.h"

namespace shoal::worker {

class Completion final : public ReplySink {
 public:
  Completion(transport::Progress& progress, RingReplies& ring);
  // Before the first message.
  void start(Accelerator& device, Late& late);

  // --- the thread that issues. A reply that waits for the device belongs to the message that runs.
  void send(wire::Kind kind, wire::ErrorKind error, uint64_t sequence,
            const std::vector<uint64_t>& payload) override;
  void sendBytes(wire::Kind kind, uint64_t sequence, std::span<const std::byte> bytes) override;
  // A message of this kind comes. If it may wait for another device, that one may wait for this.
  void beforeIssuing(wire::Kind kind);
  void issued(wire::Kind kind, uint64_t sequence, bool failed);
  // Nothing more is to be issued now.
  void flush();

  // --- threads of their own
  [[noreturn]] void run();
  [[noreturn]] void runReads() { reads_.run(*device_, *late_); }

 private:
  struct Reply {
    wire::Kind kind;
    wire::ErrorKind error;
    std::vector<uint64_t> payload;
  };
  struct Entry {  // all messages up to `sequence`, behind those of the entry before
    uint64_t sequence;
    bool failed;  // a failure is pending that no reply has reported
    Lanes::Points points;
    std::optional<Reply> reply;
  };

  void add(Entry entry);
  Entry* first();
  bool isWanted() const;
  bool isDone(const Entry& entry);
  void tell(const Entry& entry);

  transport::Progress& progress_;
  RingReplies& ring_;
  LateReads reads_;
  Accelerator* device_ = nullptr;
  Late* late_ = nullptr;
  // Of the thread that issues.
  std::optional<Reply> reply_;
  uint64_t issued_ = 0, told_ = 0;  // messages
  bool failed_ = false;

  std::atomic<uint32_t> replies_due_{0};
  std::atomic<bool> asleep_{false};
  std::mutex mutex_;  // guards what follows
  std::deque<Entry> entries_;
};

}  // namespace shoal::worker
