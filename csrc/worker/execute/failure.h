// Turns whatever an operator throws into a Failure that can travel, and names it.
#pragma once

#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "worker/paging/segments.h"

namespace shoal::worker {

// A value was to come from another device of the lease, where it could not be made.
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

std::shared_ptr<const Failure> describe(std::exception_ptr error, uint64_t sequence,
                                        const std::string& operator_name);

}  // namespace shoal::worker
