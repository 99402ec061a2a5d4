// A failure of a call: what the worker keeps of it, sends to the client, and throws.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "wire/message.h"

namespace shoal::worker {

// Why a call failed. All outputs of the call share it.
struct Failure {
  wire::ErrorKind kind;
  uint64_t sequence;          // number of the call in the stream
  std::string operator_name;  // of kPeerLost: the name of the lost device
  std::string text;
};

// A message uses a value that a failed call did not make.
class PoisonedError : public std::runtime_error {
 public:
  explicit PoisonedError(std::shared_ptr<const Failure> cause)
      : std::runtime_error(cause->text), cause_(std::move(cause)) {}
  const std::shared_ptr<const Failure>& cause() const { return cause_; }

 private:
  std::shared_ptr<const Failure> cause_;
};

// Another device of the lease could not make the value that this device reads.
class PeerFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Another device of the lease is gone.
class PeerGone : public std::runtime_error {
 public:
  PeerGone(const std::string& text, std::string device)
      : std::runtime_error(text), device(std::move(device)) {}
  std::string device;
};

// A message uses shared memory in a way that its sharing does not allow.
class ShareError : public std::runtime_error {
 public:
  ShareError(const std::string& text, bool revoked) : std::runtime_error(text), revoked(revoked) {}
  bool revoked;
};

// Turns whatever an operator throws into a Failure. A consequence has the text and the call of its
// cause.
std::shared_ptr<const Failure> describe(std::exception_ptr error, uint64_t sequence,
                                        const std::string& operator_name);

}  // namespace shoal::worker
