// What one prepared call costs: floating point operations and bytes, from its shapes alone. Worked
// out once, when the call is prepared.
#pragma once

#include <cstdint>

#include "worker/calls/prepared.h"

namespace shoal::worker {

struct CallCosts {
  uint64_t flops = 0;  // of matrix products, convolutions and attention; 0 for all other operators
  uint64_t bytes = 0;  // read and written
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // of its first tensor
};

CallCosts costsOf(const PreparedCall& call);
// The same of a recorded call's backward pass.
CallCosts backwardCosts(const CallCosts& forward);

}  // namespace shoal::worker
