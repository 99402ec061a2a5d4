#include "client/call/issue.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstring>

#include "client/call/call_messages.h"
#include "client/call/call_template.h"
#include "client/call/output_shapes.h"
#include "client/member/interrupts.h"
#include "client/member/observer.h"
#include "client/space/generator_homes.h"
#include "client/tensor/sharded_tensor.h"
#include "client/tensor/tensor.h"
#include "wire/cursor.h"
#include "wire/layout.h"
#include "wire/limits.h"

namespace shoal::client {
namespace {

using wire::OutputKind;
using wire::Tag;

std::atomic<bool> g_blocking{false};

// One call on its way: what to run, from where, and under which graph if it is recorded.
struct Issue {
  const OperatorInfo& info;
  CallTemplate& call;
  torch::jit::Stack* stack;
  uint64_t graph;            // 0: not recorded
  Member* member = nullptr;  // of the member that runs it, once that is decided
};

// Posts the call on the member that was chosen; random numbers of the whole lease come along.
uint64_t post(const Issue& issue, uint32_t id, uint16_t flags,
              c10::ArrayRef<wire::Address> addresses, const Lock& held) {
  Member& member = *issue.member;
  Session& session = issue.call.session();
  if (issue.info.random && !session.single() && issue.call.device().index() == 0) {
    const bool own = issue.call.hasGenerator();
    bringGenerator(session, own ? issue.call.generator() : wire::kLeaseGenerator, member, held);
    if (!own) flags |= wire::kFlagLeaseRandom;
  }
  const CallWords words{issue.call.immediates(), issue.call.uses(), addresses, flags, issue.graph};
  return postCall(session, member, id, words, held);
}

void mintOutputs(const Issue& issue, const std::vector<OutputMeta>& outputs,
                 c10::SmallVectorImpl<wire::Address>& addresses, const Lock& held) {
  Session& session = issue.call.session();
  const c10::DeviceIndex index = issue.call.device().index();
  session.checkRoom(freshBytes(outputs), index, held);  // all or none
  for (const auto& output : outputs) {
    if (output.kind != OutputKind::kFresh && output.kind != OutputKind::kResized) continue;
    addresses.push_back(output.bytes == 0 ? 0 : session.mint(output.bytes, index, held));
  }
}

void applyResize(const OutputMeta& output, wire::Address address, const at::Tensor& argument) {
  auto* impl = argument.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(makeStorage(address, output.bytes, argument.device()));
  impl->set_sizes_and_strides(output.sizes, output.strides, 0);
}

// Puts the results in the arguments' place. `held` protects `outputs` and is given up before the
// arguments are: the last reference to one of them may go, and freeing it takes the lock.
void finish(const Issue& issue, const std::vector<OutputMeta>& outputs,
            c10::ArrayRef<wire::Address> addresses, c10::ArrayRef<c10::IValue> scalars,
            Lock* held) {
  const c10::Device device = issue.call.device();
  const auto arguments = torch::jit::last(*issue.stack, issue.info.argument_count);
  c10::SmallVector<c10::IValue, 4> results;
  const wire::Address* address = addresses.begin();
  const c10::IValue* scalar = scalars.begin();
  for (size_t i = 0; i < outputs.size(); ++i) {
    const OutputMeta& output = outputs[i];
    switch (output.kind) {
      case OutputKind::kFresh:
        results.emplace_back(makeTensor(*address++, output, device));
        break;
      case OutputKind::kUndefined:
        results.emplace_back(at::Tensor());
        break;
      case OutputKind::kArgument:
        results.emplace_back(arguments[output.number]);
        break;
      case OutputKind::kScalar:
        results.emplace_back(*scalar++);
        break;
      case OutputKind::kResized:
        applyResize(output, *address++, arguments[output.number].toTensor());
        break;
      case OutputKind::kList: {
        c10::List<at::Tensor> list;
        list.reserve(output.number);
        for (uint32_t k = 0; k < output.number; ++k) {
          const OutputMeta& item = outputs[++i];
          list.push_back(item.kind == OutputKind::kFresh ? makeTensor(*address++, item, device)
                                                         : at::Tensor());
        }
        results.emplace_back(std::move(list));
        break;
      }
    }
  }
  if (held != nullptr) held->unlock();
  torch::jit::drop(*issue.stack, issue.info.argument_count);
  for (auto& result : results) issue.stack->push_back(std::move(result));
}

OutputMeta parseMeta(wire::Reader& reader) {
  const wire::OutputItem item = wire::OutputItem::read(reader);
  OutputMeta meta;
  meta.kind = item.kind;
  meta.number = item.number;
  if (meta.kind != OutputKind::kFresh && meta.kind != OutputKind::kResized) return meta;
  meta.dtype = static_cast<c10::ScalarType>(item.dtype);
  meta.sizes.assign(item.shape.sizes.begin(), item.shape.sizes.end());
  meta.strides.assign(item.shape.strides.begin(), item.shape.strides.end());
  const int64_t bytes = wire::spanBytes(meta.sizes.data(), meta.strides.data(), meta.sizes.size(),
                                        static_cast<int64_t>(c10::elementSize(meta.dtype)));
  TORCH_CHECK(bytes >= 0, "shoal: the worker sent a malformed shape");
  meta.bytes = static_cast<uint64_t>(bytes);
  return meta;
}

c10::IValue parseScalar(wire::Reader& reader) {
  const wire::ArgumentItem item = wire::ArgumentItem::read(reader);
  switch (item.tag) {
    case Tag::kBool:
      return item.boolean();
    case Tag::kInt:
      return static_cast<int64_t>(item.value);
    case Tag::kFloatKeyed:
      return item.number();
    default:
      return {};
  }
}

// Another device can be told of a call whose outputs are known now, if they are so for all values.
void recordLearnt(const Issue& issue, bool repeatable, const std::vector<OutputMeta>& outputs,
                  c10::ArrayRef<wire::Address> addresses, const Lock& held) {
  Observer* observer = Observer::current();
  if (observer == nullptr) return;
  if (issue.info.asks_kernel) return;  // equal devices give equal answers
  if (!repeatable) return observer->fail("the device is asked for a shape that depends on values");
  observer->called(issue.info, issue.call, issue.graph, outputs, addresses, held);
}

// Makes room for the call in the cache and tells the worker of it.
CachedCall* prepare(const Issue& issue, uint64_t hash, Lock& held) {
  Member& member = *issue.member;
  held.unlock();
  std::vector<OutputMeta> outputs;
  const auto arguments = torch::jit::last(*issue.stack, issue.info.argument_count);
  const bool known = issue.graph == 0 && inferOutputs(issue.info, arguments, outputs);
  held.lock();
  CallCache& cache = member.cache();
  const auto& key = issue.call.key();
  if (CachedCall* raced = cache.find(hash, &issue.info, key.data(), key.size())) return raced;
  if (cache.full()) {
    cache.clear();
    member.post(wire::Forget{}, held);
  }
  CachedCall* cached = cache.insert(hash, &issue.info, key.data(), key.size());
  cached->known = known;
  if (known) cached->outputs = std::move(outputs);
  postPrepare(member, issue.info, key, *cached, held);
  return cached;
}

// The outputs are not known: the worker runs the call and tells.
void learn(const Issue& issue) {
  Member& member = *issue.member;
  Session& session = issue.call.session();
  std::unique_lock one_at_a_time(member.learning(), std::defer_lock);
  for (Wait wait; !one_at_a_time.try_lock_for(std::chrono::milliseconds(50));) wait.look();
  uint32_t id;
  uint64_t sequence;
  {
    Lock held = session.lock();
    CachedCall* cached = member.cache().find(issue.call.hash(issue.info), &issue.info,
                                             issue.call.key().data(), issue.call.key().size());
    // Another thread may have emptied the cache.
    if (cached == nullptr) cached = prepare(issue, issue.call.hash(issue.info), held);
    id = cached->id;
    session.makeRoom(member, issue.call.uses(), 0, held);
    sequence = post(issue, id, wire::kFlagLearn, {}, held);
    ++member.traffic(held).round_trips;
  }
  const auto payload = member.await(sequence);
  wire::Reader reader(payload.data(), payload.size());
  std::vector<OutputMeta> outputs;
  std::vector<c10::IValue> scalars;
  bool repeatable = !issue.info.dynamic;
  while (reader.remaining() > 0) {
    outputs.push_back(parseMeta(reader));
    if (outputs.back().kind == OutputKind::kScalar) scalars.push_back(parseScalar(reader));
    repeatable = repeatable && outputs.back().kind != OutputKind::kScalar &&
                 outputs.back().kind != OutputKind::kResized;
  }
  c10::SmallVector<wire::Address, 4> addresses;
  {
    const Lock held = session.lock();
    mintOutputs(issue, outputs, addresses, held);
    const uint64_t bound = member.post(wire::Bind{addresses}, held);
    for (const wire::Address address : addresses) {
      if (address != 0) session.made(address, member, bound, held);
    }
    recordLearnt(issue, repeatable, outputs, addresses, held);
    CachedCall* cached = member.cache().find(issue.call.hash(issue.info), &issue.info,
                                             issue.call.key().data(), issue.call.key().size());
    if (repeatable && cached != nullptr && cached->id == id) {
      cached->outputs = outputs;
      cached->known = true;
      postPrepare(member, issue.info, issue.call.key(), *cached, held);
    }
  }
  finish(issue, outputs, addresses, scalars, nullptr);
}

Issued issue(Issue issue) {
  Session& session = issue.call.session();
  const uint64_t hash = issue.call.hash(issue.info);
  const auto& key = issue.call.key();
  session.awaitRoom(issue.call.device().index());
  Lock held = session.lock();
  Member& member = session.place(issue.call.uses(), issue.call.device().index(), 0, held);
  issue.member = &member;
  member.bringSettings(issue.info.reads_precisions, held);
  CachedCall* cached = member.cache().find(hash, &issue.info, key.data(), key.size());
  if (cached == nullptr) cached = prepare(issue, hash, held);
  if (!cached->known) {
    held.unlock();
    learn(issue);
    return {&member, &session, {}};
  }
  if (largestBytes(cached->outputs) > session.wholeBytesMax() && !WholeSegments::wanted()) {
    return {&member, &session, cached->outputs};
  }
  c10::SmallVector<wire::Address, 4> addresses;
  mintOutputs(issue, cached->outputs, addresses, held);
  session.makeRoom(member, issue.call.uses(), freshBytes(cached->outputs), held);
  post(issue, cached->id, 0, addresses, held);
  if (Observer* observer = Observer::current()) {
    observer->called(issue.info, issue.call, issue.graph, cached->outputs, addresses, held);
  }
  finish(issue, cached->outputs, addresses, {}, &held);
  if (g_blocking.load(std::memory_order_relaxed)) member.synchronize();
  return {&member, &session, {}};
}

// Index operators take CPU indices: they are moved to the device like local torch does.
void uploadIndices(const OperatorInfo& info, torch::jit::Stack* stack, c10::Device device) {
  const size_t first = stack->size() - info.argument_count;
  for (size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    const auto moved = [device](const at::Tensor& t) {
      return t.defined() && t.device().is_cpu() && t.dim() > 0 ? t.to(device) : t;
    };
    if (value.isTensor()) {
      value = moved(value.toTensor());
    } else if (value.isList() && !value.isIntList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const c10::IValue& item : value.toListRef()) {
        list.push_back(item.isTensor() ? std::optional(moved(item.toTensor())) : std::nullopt);
      }
      value = std::move(list);
    }
  }
}

}  // namespace

Issued issueCall(const OperatorInfo& info, torch::jit::Stack* stack, uint64_t graph) {
  static thread_local CallTemplate reused;
  static thread_local bool in_use = false;
  if (in_use) {  // an operator inside an operator (shape functions, uploads)
    CallTemplate own;
    own.build(info, torch::jit::last(*stack, info.argument_count), graph != 0);
    if (own.needsUpload()) {
      uploadIndices(info, stack, own.device());
      own.build(info, torch::jit::last(*stack, info.argument_count), graph != 0);
    }
    return issue({info, own, stack, graph});
  }
  struct Mark {
    Mark() { in_use = true; }
    ~Mark() { in_use = false; }
  } const mark;
  reused.build(info, torch::jit::last(*stack, info.argument_count), graph != 0);
  if (reused.needsUpload()) {
    uploadIndices(info, stack, reused.device());
    reused.build(info, torch::jit::last(*stack, info.argument_count), graph != 0);
  }
  return issue({info, reused, stack, graph});
}

void setBlocking(bool blocking) {
  g_blocking = blocking;
}

}  // namespace shoal::client
