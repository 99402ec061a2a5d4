// What the client of a remote worker waits for: replies, bytes of copies, and times of events, each
// by the message after which the worker's link must send it. The link's receiver adds to it, and
// its sender takes from it and sleeps until the next is due.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

#include "network/frames.h"
#include "network/staging.h"
#include "transport/progress.h"

namespace shoal::network {

class DueReports {
 public:
  explicit DueReports(transport::Progress& progress) : progress_(progress) {}

  // --- the receiver. Messages come in order; the op ring bounds how many are due.
  void addReply(uint64_t sequence);
  // Waits for room in the staging memory. Returns the offset of the bytes there.
  uint64_t addCopy(uint64_t bytes, uint64_t sequence);
  // Of more than the progress page keeps the oldest are forgotten.
  void addEvent(uint64_t event, uint64_t sequence);

  // --- the sender
  struct Copy {
    uint64_t sequence, offset, bytes;
  };
  // What is due up to message `sequence`, the earliest first.
  std::optional<Copy> takeCopy(uint64_t sequence);
  std::optional<uint64_t> takeEvent(uint64_t sequence);
  void replied(uint64_t sequence);
  // The bytes of copies up to message `sequence` have left. Any thread may call this.
  void release(uint64_t sequence);
  // The sender is about to sleep for `sequence`, the next message after which something is due.
  struct Next {
    uint64_t sequence;
    bool is_reply;
  };
  Next sleepForNext();
  void wokeUp();

 private:
  void wakeIfLater(uint64_t sequence);

  transport::Progress& progress_;
  std::mutex mutex_;  // guards all that follows
  std::condition_variable released_;
  Staging out_{kStagingBytes, kStagingBytes};
  struct Event {
    uint64_t sequence, event;
  };
  std::deque<Copy> copies_;
  std::deque<Event> events_;
  std::deque<uint64_t> replies_;
  uint64_t asleep_for_ = 0;  // of the sender; 0: it is awake
};

}  // namespace shoal::network
