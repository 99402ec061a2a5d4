// Counts the calls of a session in the block that its device server reads. The program is not asked
// and not changed. A call adds three numbers; everything else is worked out when it is prepared.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "transport/session_block.h"
#include "wire/messages.h"
#include "worker/calls/call_costs.h"

namespace shoal::worker {

// A prepared call's entry in the block.
struct CallRow {
  transport::CallUse* use = nullptr;
  uint32_t written_word = UINT32_MAX;  // of the immediates: the first tensor that it changes
  uint64_t written = 0;                // the address that it changed first

  void count(const uint64_t* immediates, int64_t took_ns) {
    if (use == nullptr) return;
    transport::addTo(use->calls, 1);
    transport::addTo(use->ns, static_cast<uint64_t>(took_ns));
    if (written_word == UINT32_MAX) return;
    const uint64_t address = immediates[written_word];
    if (written == address) {
      transport::addTo(use->repeats, 1);
    } else if (written == 0) {
      written = address;
    }
  }
};

class CallProfile {
 public:
  // Without a block it counts nothing.
  explicit CallProfile(transport::SessionBlock* block);

  CallRow row(const wire::Prepare& message, const PreparedCall& call);
  // The row of the backward pass of a recorded call.
  CallRow backwardRow(const CallRow& forward);

 private:
  transport::CallUse* add(uint64_t hash, std::string_view name, const CallCosts& costs,
                          bool updates);

  transport::SessionBlock* block_;
  std::unordered_map<uint64_t, uint32_t> rows_;  // by hash
};

}  // namespace shoal::worker
