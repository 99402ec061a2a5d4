// The replies of one op stream, and the failure that waits for one.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "wire/message.h"
#include "worker/failure/failure.h"

namespace shoal::worker {

// Where replies go.
class ReplySink {
 public:
  virtual ~ReplySink() = default;
  virtual void send(wire::Kind kind, wire::ErrorKind error, uint64_t sequence,
                    const std::vector<uint64_t>& payload) = 0;
  // A reply of bytes. They are there when the message is done.
  virtual void sendBytes(wire::Kind kind, uint64_t sequence, std::span<const std::byte> bytes) = 0;
};

// The payload of a reply that is an error. `shown_in`: the message in which the failure showed; 0:
// the one that is replied to.
std::vector<uint64_t> errorPayload(const Failure& failure, uint64_t shown_in);
// The payload of a reply of bytes.
std::vector<uint64_t> dataPayload(std::span<const std::byte> bytes);

// A message gets one reply at most. The reply of an older failure takes its place.
class Replies {
 public:
  explicit Replies(ReplySink& sink) : sink_(sink) {}

  // Message `sequence` runs now. It is `expected` to get a reply.
  void begin(wire::Kind kind, uint64_t sequence, bool expected) {
    kind_ = kind;
    sequence_ = sequence;
    owed_ = expected;
  }
  wire::Kind kind() const { return kind_; }
  uint64_t sequence() const { return sequence_; }
  // Whether a failure is pending that no reply has reported.
  bool hasFailed() const { return pending_.failure != nullptr; }

  void reply(const std::vector<uint64_t>& payload);
  void replyBytes(std::span<const std::byte> bytes);
  // The message is done: replies without a payload if nothing else did.
  void finish() {
    if (owed_) reply({});
  }
  // Reports the failure with the reply of this message, or keeps it for the next one.
  void fail(std::shared_ptr<const Failure> failure);

 private:
  bool replyPending();
  void replyFailure(const Failure& failure, uint64_t shown_in);

  struct Pending {  // the first failure that no reply has reported
    std::shared_ptr<const Failure> failure;
    uint64_t at = 0;  // the message in which it showed
  };

  ReplySink& sink_;
  wire::Kind kind_ = wire::Kind::kPad;
  uint64_t sequence_ = 0;
  bool owed_ = false;  // the message has yet to get its reply
  Pending pending_;
};

}  // namespace shoal::worker
