// How operators may be cut into parts: what the parts of a call are, and how their results become
// the call's.
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

#include "client/call/operator_info.h"

namespace shoal::client {

// How the parts' results become one.
enum class Join { kCat, kSum, kMax, kMin, kProd, kAll, kAny, kNorm };

// One way to cut a call: each argument along one dimension, or not at all.
struct Cut {
  std::vector<int64_t> dims;  // by argument; -1: every part gets it whole
  int64_t out_dim = -1;       // where kCat joins
  std::vector<Join> joins;    // by return
};

// All ways in which this call may be cut along one dimension; empty if it can not.
std::vector<Cut> cutsOf(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments);

// Operators that pick rows by number, or whose parts depend on one another, each in a way of its
// own. True if this is one of them and it was run; `stack` then holds the results.
bool runByRows(const OperatorInfo& info, torch::jit::Stack* stack);

}  // namespace shoal::client
