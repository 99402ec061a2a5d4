#include "worker/execute/calls.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <time.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstring>

#include "base/clock.h"
#include "transport/ring.h"
#include "wire/layout.h"
#include "wire/limits.h"
#include "worker/failure/failure.h"

namespace shoal::worker {

using wire::OutputKind;
using wire::ProtocolError;
using wire::Tag;

namespace {

Shape shapeOf(const at::Tensor& tensor) {
  Shape shape;
  if (!tensor.defined()) return shape;
  shape.dtype = tensor.scalar_type();
  shape.sizes = tensor.sizes().vec();
  shape.strides = tensor.strides().vec();
  return shape;
}

bool sameLayout(const Shape& shape, const at::Tensor& tensor) {
  if (tensor.sizes() != at::IntArrayRef(shape.sizes)) return false;
  if (tensor.numel() == 0) return true;
  for (size_t i = 0; i < shape.sizes.size(); ++i) {
    if (shape.sizes[i] != 1 && tensor.stride(static_cast<int64_t>(i)) != shape.strides[i])
      return false;
  }
  return true;
}

// Whether the storage can become a segment as it is: only this tensor holds it, and starts where it
// starts. It must hold all that the tensor spans: torch's "zero tensors" have no memory at all.
bool ownsStorage(const at::Tensor& tensor, size_t holders) {
  return tensor.has_storage() && tensor.storage().use_count() == holders &&
         tensor.storage_offset() == 0 && !tensor.is_conj() && !tensor.is_neg() &&
         (tensor.numel() == 0 || tensor.storage().data() != nullptr);
}

// The worker's loop runs below autograd. A recorded call needs autograd for one operator.
struct AboveAutograd {
  c10::impl::ForceDispatchKeyGuard keys{c10::default_included_set, c10::default_excluded_set};
  c10::AutoGradMode with_grad{true};
};

// For one operator, the device's default generator continues the lease's generator.
class LeaseRandom {
 public:
  explicit LeaseRandom(Generators& generators)
      : device_(generators.get(0)), lease_(generators.get(wire::kLeaseGenerator)) {
    own_ = device_.get_state();
    device_.set_state(lease_.get_state());
  }
  ~LeaseRandom() {
    lease_.set_state(device_.get_state());
    device_.set_state(own_);
  }

 private:
  at::Generator& device_;
  at::Generator& lease_;
  at::Tensor own_;
};

void appendTensor(std::vector<uint64_t>& payload, OutputKind kind, const at::Tensor& tensor,
                  uint32_t number = 0) {
  wire::appendOutput(payload, kind, number, static_cast<uint8_t>(tensor.scalar_type()),
                     tensor.sizes(), tensor.strides());
}

void appendScalar(std::vector<uint64_t>& payload, const c10::IValue& value) {
  wire::appendOutput(payload, OutputKind::kScalar);
  if (value.isBool()) {
    wire::appendBool(payload, value.toBool());
  } else if (value.isInt()) {
    wire::appendValue(payload, Tag::kInt, static_cast<uint64_t>(value.toInt()));
  } else if (value.isDouble()) {
    wire::appendValue(payload, Tag::kFloatKeyed, wire::asWord(value.toDouble()));
  } else if (value.isNone()) {
    wire::appendTag(payload, Tag::kNone);
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "a result of type ", value.tagKind(),
                                " cannot be sent to the client");
  }
}

}  // namespace

void Calls::prepare(const wire::Prepare& message, uint64_t sequence) {
  operator_name_ = message.name;
  Entry& entry = prepared_[message.id];
  prepared_words_ -= entry.words;
  entry = Entry();
  entry.words = message.arguments.size() + message.outputs.size();
  prepared_words_ += entry.words;
  try {
    if (prepared_words_ > wire::kPreparedWordsMax) {
      throw ProtocolError("the prepared calls of this session are too large together");
    }
    entry.call = parsePrepared(message, device_);
  } catch (...) {
    // Reported when the call comes, so that a learning call can raise it in the client's own line.
    entry.failure = describe(std::current_exception(), sequence, operator_name_);
  }
}

std::optional<std::vector<uint64_t>> Calls::call(const wire::Call& message, uint64_t sequence) {
  const auto found = prepared_.find(message.id);
  if (found == prepared_.end()) throw ProtocolError("the call was never prepared");
  const wire::Words outputs = message.outputs;
  if (found->second.failure != nullptr) {
    poison(outputs, found->second.failure);
    operator_name_ = found->second.failure->operator_name;
    throw PoisonedError(found->second.failure);
  }
  const PreparedCall& prepared = *found->second.call;
  operator_name_ = prepared.name;
  if (message.immediates.size() != prepared.immediate_words) {
    throw ProtocolError("the call has " + std::to_string(message.immediates.size()) +
                        " immediates, prepared were " + std::to_string(prepared.immediate_words));
  }
  const bool learning = (message.flags & wire::kFlagLearn) != 0;
  if (!learning && outputs.size() != prepared.fresh_outputs) {
    throw ProtocolError("the call names " + std::to_string(outputs.size()) +
                        " outputs, prepared were " + std::to_string(prepared.fresh_outputs));
  }
  Run state;
  state.immediates = message.immediates.data();
  state.record = (message.flags & wire::kFlagRecord) != 0;
  state.lease_random = (message.flags & wire::kFlagLeaseRandom) != 0;
  try {
    return run(prepared, state, message);
  } catch (...) {
    poison(outputs, describe(std::current_exception(), sequence, operator_name_));
    throw;
  }
}

std::optional<std::vector<uint64_t>> Calls::run(const PreparedCall& prepared, Run& run,
                                                const wire::Call& message) {
  const bool learning = (message.flags & wire::kFlagLearn) != 0;
  run.stack.reserve(prepared.arguments.size());
  for (const uint32_t word : prepared.address_words) segments_.expect(run.immediates[word]);
  for (size_t i = 0; i < prepared.arguments.size(); ++i) {
    run.writes = prepared.written[i];
    run.stack.push_back(build(prepared.arguments[i], run));
  }
  if (run.poison != nullptr) {
    // A reply reports the failure itself. Its consequences are only marked.
    if (learning) throw PoisonedError(run.poison);
    poison(message.outputs, run.poison);
    return std::nullopt;
  }
  torch::jit::Stack arguments;
  std::vector<Shape> before;
  if (learning) {
    arguments = run.stack;
    for (const auto& value : arguments) {
      before.push_back(value.isTensor() ? shapeOf(value.toTensor()) : Shape());
    }
  }
  invoke(prepared, run);
  if (run.record) keepGraph(message.graph, run);
  if (learning) return learn(prepared, run.stack, arguments, before);
  bindOutputs(prepared, run.stack, message.outputs);
  return std::nullopt;
}

c10::IValue Calls::build(const Argument& argument, Run& run) {
  if (argument.is_constant) return argument.constant;
  switch (argument.tag) {
    case Tag::kTensor:
      return buildTensor(argument.shape, run);
    case Tag::kHostScalar: {
      at::Tensor scalar = at::empty({}, argument.shape.dtype);
      std::memcpy(scalar.data_ptr(), run.immediates, scalar.nbytes());
      run.immediates += 2;
      if (argument.shape.flags & wire::kTensorWrapped) {
        scalar.unsafeGetTensorImpl()->set_wrapped_number(true);
      }
      return scalar;
    }
    case Tag::kIntFree:
      return static_cast<int64_t>(*run.immediates++);
    case Tag::kFloat:
      return wire::asDouble(*run.immediates++);
    case Tag::kComplex: {
      const double real = wire::asDouble(*run.immediates++);
      return c10::complex<double>(real, wire::asDouble(*run.immediates++));
    }
    case Tag::kGenerator:
      return generators_.get(*run.immediates++);
    case Tag::kList:
      return buildList(argument, run);
    default:
      throw ProtocolError("an argument cannot be built");
  }
}

c10::IValue Calls::buildList(const Argument& argument, Run& run) {
  if (argument.element->kind() == c10::TypeKind::TensorType) {
    c10::List<at::Tensor> values;
    values.reserve(argument.items.size());
    for (const auto& item : argument.items) values.push_back(build(item, run).toTensor());
    return values;
  }
  c10::impl::GenericList values(argument.element);
  values.reserve(argument.items.size());
  for (const auto& item : argument.items) values.push_back(build(item, run));
  return values;
}

at::Tensor Calls::buildTensor(const Shape& shape, Run& run) {
  at::Tensor tensor = tensorAt(*run.immediates++, shape, run.writes, run.poison);
  if (run.record && (shape.flags & wire::kTensorRequiresGrad) && tensor.defined()) {
    tensor.set_requires_grad(true);
    run.leaves.push_back(tensor);
  }
  return tensor;
}

at::Tensor Calls::tensorAt(wire::Address address, const Shape& shape, bool writes,
                           std::shared_ptr<const Failure>& poison) {
  c10::Storage storage;
  int64_t offset = 0;
  if (address == 0 && shape.span_bytes == 0) {
    auto* allocator = c10::GetAllocator(device_.type());
    storage = c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator, /*resizable=*/true);
  } else {
    const Place place = segments_.use(address, static_cast<uint64_t>(shape.span_bytes), writes);
    if (place.segment->poison != nullptr) {
      poison = place.segment->poison;
      return {};
    }
    if (place.offset % static_cast<uint64_t>(shape.item_bytes) != 0) {
      throw ProtocolError("an address is not aligned to its dtype");
    }
    storage = place.segment->storage;
    offset = static_cast<int64_t>(place.offset) / shape.item_bytes;
  }
  const auto key = c10::computeDispatchKey(shape.dtype, c10::kStrided, device_);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(shape.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides, offset);
  if (shape.flags & wire::kTensorConj) tensor.unsafeGetTensorImpl()->_set_conj(true);
  if (shape.flags & wire::kTensorNeg) tensor.unsafeGetTensorImpl()->_set_neg(true);
  return tensor;
}

void Calls::invoke(const PreparedCall& prepared, Run& run) {
  std::optional<LeaseRandom> random;
  if (run.lease_random) random.emplace(generators_);
  const int64_t start = nowNs();
  if (run.record) {
    const AboveAutograd above;
    run_operator_(prepared.op, run.stack);
  } else {
    run_operator_(prepared.op, run.stack);
  }
  const int64_t took_ns = nowNs() - start;
  ++count_;
  busy_ns_ += took_ns;
  if (speed_ < 1.0) throttle(took_ns);
}

int64_t Calls::threadCpuNs() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void Calls::throttle(int64_t took_ns) {
  // Other threads on this core do not make the device slower. (Of several threads this sees one.)
  const int64_t worked_ns = threadCpuNs();
  if (at::get_num_threads() == 1) took_ns = std::min(took_ns, worked_ns - worked_seen_ns_);
  worked_seen_ns_ = worked_ns;
  owed_ns_ += static_cast<int64_t>(static_cast<double>(took_ns) * (1.0 / speed_ - 1.0));
  if (owed_ns_ < 1000000) return;  // many short sleeps cost more than they last
  const int64_t start = nowNs();
  const timespec pause{owed_ns_ / 1000000000, owed_ns_ % 1000000000};
  nanosleep(&pause, nullptr);
  owed_ns_ -= nowNs() - start;
}

void Calls::bindOutputs(const PreparedCall& prepared, const torch::jit::Stack& results,
                        wire::Words addresses) {
  size_t at = 0;
  auto address = addresses.begin();
  const auto next = [&]() -> const Output& {
    if (at >= prepared.outputs.size())
      throw ProtocolError("the operator returned more than prepared");
    return prepared.outputs[at++];
  };
  const auto bindOne = [&](const at::Tensor& value) {
    const Output& output = next();
    if (output.kind != OutputKind::kFresh) return;
    TORCH_CHECK(value.defined(), "the operator returned no tensor where one was prepared");
    bindOutput(output.shape, value, *address++);
  };
  for (const auto& result : results) {
    if (result.isTensor()) {
      bindOne(result.toTensor());
    } else if (result.isTensorList()) {
      const Output& list = next();
      const auto values = result.toTensorVector();
      TORCH_CHECK(list.kind == OutputKind::kList && list.number == values.size(),
                  "the operator returned a list of ", values.size(), " tensors, prepared were ",
                  list.number);
      for (const auto& value : values) bindOne(value);
    } else {
      next();
    }
  }
}

void Calls::bindOutput(const Shape& shape, const at::Tensor& value, wire::Address address) {
  TORCH_CHECK(value.layout() == c10::kStrided, "the operator returned a ", value.layout(),
              " tensor, which a shoal address cannot hold");
  TORCH_CHECK(value.sizes() == at::IntArrayRef(shape.sizes) && value.scalar_type() == shape.dtype,
              "the operator's result has sizes ", value.sizes(), " and dtype ", value.scalar_type(),
              ", but sizes ", at::IntArrayRef(shape.sizes), " and dtype ", shape.dtype,
              " were expected: its output depends on more than its arguments' shapes");
  if (address == 0) return;  // no bytes, so no segment
  if (sameLayout(shape, value) && ownsStorage(value, 1) && value.device() == device_) {
    segments_.bind(address, value.storage(), static_cast<uint64_t>(shape.span_bytes));
    return;
  }
  // The layout is not what the client expects, or something else holds the memory too.
  at::Tensor copy = at::empty_strided(shape.sizes, shape.strides,
                                      at::TensorOptions().dtype(shape.dtype).device(device_));
  copy.copy_(value);
  segments_.bind(address, copy.storage(), static_cast<uint64_t>(shape.span_bytes));
}

void Calls::poison(wire::Words addresses, const std::shared_ptr<const Failure>& failure) {
  for (const wire::Address address : addresses) {
    if (address != 0) segments_.poison(address, failure);
  }
}

std::vector<uint64_t> Calls::learn(const PreparedCall& prepared, const torch::jit::Stack& results,
                                   const torch::jit::Stack& arguments,
                                   const std::vector<Shape>& before) {
  learned_.clear();
  std::vector<uint64_t> payload;
  for (const auto& result : results) {
    if (result.isTensor()) {
      learnTensor(result.toTensor(), arguments, prepared, payload);
    } else if (result.isTensorList()) {
      const auto values = result.toTensorVector();
      TORCH_CHECK(values.size() < wire::kOutputsMax, "the operator returned too many tensors");
      wire::appendOutput(payload, OutputKind::kList, static_cast<uint32_t>(values.size()));
      for (const auto& value : values) learnTensor(value, arguments, prepared, payload);
    } else {
      appendScalar(payload, result);
    }
  }
  for (uint32_t i = 0; i < arguments.size(); ++i) {
    if (!prepared.written[i] || !arguments[i].isTensor() || !arguments[i].toTensor().defined()) {
      continue;
    }
    const at::Tensor& argument = arguments[i].toTensor();
    if (argument.sizes() == at::IntArrayRef(before[i].sizes) &&
        argument.strides() == at::IntArrayRef(before[i].strides)) {
      continue;
    }
    // The operator resized an `out=` argument: it gets a segment of its own again.
    learned_.push_back(argument.clone(at::MemoryFormat::Preserve));
    appendTensor(payload, OutputKind::kResized, learned_.back(), i);
  }
  return payload;
}

void Calls::learnTensor(const at::Tensor& value, const torch::jit::Stack& arguments,
                        const PreparedCall& prepared, std::vector<uint64_t>& payload) {
  if (!value.defined()) {
    return wire::appendOutput(payload, OutputKind::kUndefined);
  }
  for (uint32_t i = 0; i < arguments.size(); ++i) {
    if (prepared.written[i] && arguments[i].isTensor() && arguments[i].toTensor().is_same(value)) {
      return wire::appendOutput(payload, OutputKind::kArgument, i);
    }
  }
  TORCH_CHECK_NOT_IMPLEMENTED(value.layout() == c10::kStrided, "the operator returned a ",
                              value.layout(), " tensor, which a shoal device cannot hold");
  at::Tensor fresh = value.device() == device_ ? value : value.to(device_);
  // A recorded output stays part of its graph; the client's copy of it shares the memory.
  if (fresh.requires_grad()) fresh = fresh.detach();
  if (!fresh.is_non_overlapping_and_dense() || !ownsStorage(fresh, fresh.is_same(value) ? 1 : 2)) {
    at::Tensor copy = at::empty_like(fresh, at::MemoryFormat::Preserve);
    fresh = copy.copy_(fresh);
  }
  learned_.push_back(fresh);
  appendTensor(payload, OutputKind::kFresh, fresh);
}

void Calls::bindLearned(const wire::Bind& message) {
  const auto outputs = std::exchange(learned_, {});
  if (message.outputs.size() != outputs.size()) {
    throw ProtocolError("the addresses do not match the outputs");
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const wire::Address address = message.outputs[i];
    if (address == 0) continue;
    const Shape shape = shapeOf(outputs[i]);
    const int64_t bytes = wire::spanBytes(shape.sizes.data(), shape.strides.data(),
                                          shape.sizes.size(), outputs[i].itemsize());
    segments_.bind(address, outputs[i].storage(), static_cast<uint64_t>(bytes));
  }
}

void Calls::keepGraph(uint64_t graph, Run& run) {
  if (graphs_.size() >= wire::kGraphsMax) throw ProtocolError("too many graphs are alive");
  Graph& kept = graphs_[graph];
  kept = Graph();
  kept.leaves = std::move(run.leaves);
  for (auto& result : run.stack) {
    TORCH_CHECK(result.isTensor(), "only operators that return tensors can be recorded");
    kept.outputs.push_back(result.toTensor());
    // The client gets the value. The graph keeps the variable.
    result = result.toTensor().detach();
  }
}

void Calls::backward(const wire::Backward& message, uint64_t sequence) {
  const auto found = graphs_.find(message.graph);
  if (found == graphs_.end()) throw ProtocolError("the graph is not there any more");
  Graph& graph = found->second;
  const wire::Words gradients = message.gradients, addresses = message.outputs;
  if (gradients.size() != graph.outputs.size() || addresses.size() != graph.leaves.size()) {
    throw ProtocolError("the gradients do not match the graph");
  }
  operator_name_ = "backward";
  try {
    std::shared_ptr<const Failure> poisoned;
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> seeds;
    for (size_t i = 0; i < graph.outputs.size(); ++i) {
      if (gradients[i] == 0 || !graph.outputs[i].requires_grad()) continue;
      Shape shape = shapeOf(graph.outputs[i].contiguous());
      shape.item_bytes = graph.outputs[i].itemsize();
      shape.span_bytes = graph.outputs[i].numel() * shape.item_bytes;
      outputs.push_back(graph.outputs[i]);
      seeds.push_back(tensorAt(gradients[i], shape, false, poisoned));
    }
    if (poisoned != nullptr) return poison(addresses, poisoned);
    const AboveAutograd above;
    const int64_t start = nowNs();
    const auto found_gradients =
        torch::autograd::grad(outputs, graph.leaves, seeds, /*retain_graph=*/true,
                              /*create_graph=*/false, /*allow_unused=*/true);
    busy_ns_ += nowNs() - start;
    if (speed_ < 1.0) throttle(nowNs() - start);
    const at::AutoDispatchBelowADInplaceOrView below;
    for (size_t i = 0; i < graph.leaves.size(); ++i) {
      const at::Tensor& leaf = graph.leaves[i];
      const at::Tensor gradient = found_gradients[i].defined()
                                      ? found_gradients[i].contiguous()
                                      : at::zeros(leaf.sizes(), leaf.options());
      Shape shape = shapeOf(gradient);
      shape.span_bytes = static_cast<int64_t>(gradient.nbytes());
      bindOutput(shape, gradient, addresses[i]);
    }
  } catch (...) {
    poison(addresses, describe(std::current_exception(), sequence, operator_name_));
    throw;
  }
}

}  // namespace shoal::worker
