#include "client/dispatch/dispatch.h"

#include "client/call/issue.h"
#include "client/call/output_shapes.h"
#include "client/dispatch/foreach_items.h"
#include "client/dispatch/sharded_calls.h"
#include "client/space/sharded_segments.h"
#include "client/tensor/shape_inference.h"

namespace shoal::client {
namespace {

const Member& run(const OperatorInfo& info, torch::jit::Stack* stack, uint64_t graph) {
  const Issued issued = issueCall(info, stack, graph);
  if (!issued.too_large.empty()) {
    runShardedResult(info, stack, *issued.session, issued.too_large);
  }
  return *issued.member;
}

}  // namespace

void dispatchCall(const OperatorInfo& info, torch::jit::Stack* stack) {
  if (ShapeInference::active()) return reachedWhileInferring(info, stack);
  CallLines::note();
  if (anySharded() && runSharded(info, stack)) return;
  if (info.foreach_lists && splitItems(info, stack)) return;
  run(info, stack, 0);
}

void dispatchWhole(const OperatorInfo& info, torch::jit::Stack* stack) {
  run(info, stack, 0);
}

const Member& dispatchWithWorkerGraph(const OperatorInfo& info, torch::jit::Stack* stack,
                                      uint64_t graph) {
  CallLines::note();
  return run(info, stack, graph);
}

}  // namespace shoal::client
