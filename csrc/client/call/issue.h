// One call on one device: from an operator's arguments to a message, and to tensors for its
// results.
#pragma once

#include <ATen/core/stack.h>

#include <vector>

#include "client/call/operator_info.h"
#include "client/member/call_cache.h"
#include "client/space/session.h"

namespace shoal::client {

struct Issued {
  const Member* member;  // that runs the call
  Session* session;
  std::vector<OutputMeta> too_large;  // results that no device holds: the call was not made
};

// Replaces the call's arguments on the stack by its results. With `graph` != 0 the worker keeps the
// call's autograd graph under that number, and needs gradients of exactly those tensors that
// require them.
Issued issueCall(const OperatorInfo& info, torch::jit::Stack* stack, uint64_t graph);

// SHOAL_BLOCKING=1: every call waits for its result, so errors appear where they happen.
void setBlocking(bool blocking);

}  // namespace shoal::client
