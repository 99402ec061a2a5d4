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

#include "transport/ring.h"
#include "wire/layout.h"
#include "wire/limits.h"
#include "worker/failure/failure.h"

namespace shoal::worker {

using wire::OutputKind;
using wire::ProtocolError;
using wire::Reader;
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

void appendShape(std::vector<uint64_t>& payload, uint64_t head, const at::Tensor& tensor) {
  payload.push_back(head);
  for (const auto size : tensor.sizes()) payload.push_back(static_cast<uint64_t>(size));
  for (const auto stride : tensor.strides()) payload.push_back(static_cast<uint64_t>(stride));
}

uint64_t shapeHead(OutputKind kind, const at::Tensor& tensor, uint32_t number = 0) {
  return wire::tagWord(static_cast<Tag>(kind), static_cast<uint8_t>(tensor.scalar_type()),
                       static_cast<uint8_t>(tensor.dim()), 0, number);
}

void appendScalar(std::vector<uint64_t>& payload, const c10::IValue& value) {
  payload.push_back(wire::tagWord(static_cast<Tag>(OutputKind::kScalar)));
  if (value.isBool()) {
    payload.push_back(wire::tagWord(Tag::kBool, value.toBool() ? 1 : 0));
  } else if (value.isInt()) {
    payload.push_back(wire::tagWord(Tag::kInt));
    payload.push_back(static_cast<uint64_t>(value.toInt()));
  } else if (value.isDouble()) {
    payload.push_back(wire::tagWord(Tag::kFloatKeyed));
    payload.push_back(wire::asWord(value.toDouble()));
  } else if (value.isNone()) {
    payload.push_back(wire::tagWord(Tag::kNone));
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "a result of type ", value.tagKind(),
                                " cannot be sent to the client");
  }
}

}  // namespace

void Calls::prepare(Reader& reader, uint64_t sequence) {
  const uint64_t first = reader.word("prepared call");
  const uint64_t second = reader.word("prepared call");
  const uint32_t id = wire::low(first);
  if (id >= wire::kPreparedMax) throw ProtocolError("a prepared call's number is too large");
  const auto name = reader.bytes(wire::high(first), wire::kOperatorNameBytesMax, "operator name");
  operator_name_ = name;
  const uint64_t* arguments = reader.words(wire::low(second), "template");
  const uint64_t* outputs = reader.words(wire::high(second), "outputs");
  reader.finish("prepared call");
  Entry& entry = prepared_[id];
  prepared_words_ -= entry.words;
  entry = Entry();
  entry.words = size_t{wire::low(second)} + wire::high(second);
  prepared_words_ += entry.words;
  try {
    if (prepared_words_ > wire::kPreparedWordsMax) {
      throw ProtocolError("the prepared calls of this session are too large together");
    }
    entry.call = parsePrepared(name, Reader(arguments, wire::low(second)),
                               Reader(outputs, wire::high(second)), device_);
  } catch (...) {
    // The call reports it, so that a synchronous call raises it in the client's own line.
    entry.failure = describe(std::current_exception(), sequence, operator_name_);
  }
}

std::optional<std::vector<uint64_t>> Calls::call(uint16_t flags, Reader& reader,
                                                 uint64_t sequence) {
  const uint64_t first = reader.word("call");
  const auto found = prepared_.find(wire::low(first));
  if (found == prepared_.end()) throw ProtocolError("the call was never prepared");
  Run state;
  state.record = (flags & wire::kFlagRecord) != 0;
  state.lease_random = (flags & wire::kFlagLeaseRandom) != 0;
  const bool learning = (flags & wire::kFlagLearn) != 0;
  const uint64_t graph = state.record ? reader.word("graph") : 0;
  if (found->second.failure != nullptr) {
    const size_t words = reader.remaining();
    const size_t count = reader.count(wire::high(first), wire::kOutputsMax, 1, "outputs");
    poison(reader.words(words, "call") + words - count, count, found->second.failure);
    operator_name_ = found->second.failure->operator_name;
    throw PoisonedError(found->second.failure);
  }
  const PreparedCall& prepared = *found->second.call;
  operator_name_ = prepared.name;
  state.immediates = reader.words(prepared.immediate_words, "immediates");
  const size_t count = reader.count(wire::high(first), wire::kOutputsMax, 1, "outputs");
  const uint64_t* addresses = reader.words(count, "output addresses");
  reader.finish("call");
  if (!learning && count != prepared.fresh_outputs) {
    throw ProtocolError("the call names " + std::to_string(count) + " outputs, prepared were " +
                        std::to_string(prepared.fresh_outputs));
  }
  try {
    return run(prepared, state, graph, learning, addresses, count);
  } catch (...) {
    poison(addresses, count, describe(std::current_exception(), sequence, operator_name_));
    throw;
  }
}

std::optional<std::vector<uint64_t>> Calls::run(const PreparedCall& prepared, Run& run,
                                                uint64_t graph, bool learning,
                                                const uint64_t* addresses, size_t count) {
  run.stack.reserve(prepared.arguments.size());
  for (const uint32_t word : prepared.address_words) segments_.expect(run.immediates[word]);
  for (size_t i = 0; i < prepared.arguments.size(); ++i) {
    run.writes = prepared.written[i];
    run.stack.push_back(build(prepared.arguments[i], run));
  }
  if (run.poison != nullptr) {
    // A reply reports the failure itself. Its consequences are only marked.
    if (learning) throw PoisonedError(run.poison);
    poison(addresses, count, run.poison);
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
  if (run.record) keepGraph(graph, run);
  if (learning) return learn(prepared, run.stack, arguments, before);
  bindOutputs(prepared, run.stack, addresses);
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
  const int64_t start = transport::nowNs();
  if (run.record) {
    const AboveAutograd above;
    run_operator_(prepared.op, run.stack);
  } else {
    run_operator_(prepared.op, run.stack);
  }
  const int64_t took_ns = transport::nowNs() - start;
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
  const int64_t start = transport::nowNs();
  const timespec pause{owed_ns_ / 1000000000, owed_ns_ % 1000000000};
  nanosleep(&pause, nullptr);
  owed_ns_ -= transport::nowNs() - start;
}

void Calls::bindOutputs(const PreparedCall& prepared, const torch::jit::Stack& results,
                        const uint64_t* addresses) {
  size_t at = 0;
  const auto next = [&]() -> const Output& {
    if (at >= prepared.outputs.size())
      throw ProtocolError("the operator returned more than prepared");
    return prepared.outputs[at++];
  };
  const auto bindOne = [&](const at::Tensor& value) {
    const Output& output = next();
    if (output.kind != OutputKind::kFresh) return;
    TORCH_CHECK(value.defined(), "the operator returned no tensor where one was prepared");
    bindOutput(output.shape, value, *addresses++);
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

void Calls::poison(const uint64_t* addresses, size_t count,
                   const std::shared_ptr<const Failure>& failure) {
  for (size_t i = 0; i < count; ++i) {
    if (addresses[i] != 0) segments_.poison(addresses[i], failure);
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
      payload.push_back(wire::tagWord(static_cast<Tag>(OutputKind::kList), 0, 0, 0,
                                      static_cast<uint32_t>(values.size())));
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
    appendShape(payload, shapeHead(OutputKind::kResized, learned_.back(), i), learned_.back());
  }
  return payload;
}

void Calls::learnTensor(const at::Tensor& value, const torch::jit::Stack& arguments,
                        const PreparedCall& prepared, std::vector<uint64_t>& payload) {
  if (!value.defined()) {
    payload.push_back(wire::tagWord(static_cast<Tag>(OutputKind::kUndefined)));
    return;
  }
  for (uint32_t i = 0; i < arguments.size(); ++i) {
    if (prepared.written[i] && arguments[i].isTensor() && arguments[i].toTensor().is_same(value)) {
      payload.push_back(wire::tagWord(static_cast<Tag>(OutputKind::kArgument), 0, 0, 0, i));
      return;
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
  appendShape(payload, shapeHead(OutputKind::kFresh, fresh), fresh);
}

void Calls::bindLearned(Reader& reader) {
  const auto outputs = std::exchange(learned_, {});
  const size_t count = reader.count(reader.word("count"), wire::kOutputsMax, 1, "addresses");
  if (count != outputs.size()) throw ProtocolError("the addresses do not match the outputs");
  for (size_t i = 0; i < count; ++i) {
    const wire::Address address = reader.word("address");
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

void Calls::backward(Reader& reader, uint64_t sequence) {
  const auto found = graphs_.find(reader.word("graph"));
  if (found == graphs_.end()) throw ProtocolError("the graph is not there any more");
  Graph& graph = found->second;
  const uint64_t counts = reader.word("counts");
  if (wire::low(counts) != graph.outputs.size() || wire::high(counts) != graph.leaves.size()) {
    throw ProtocolError("the gradients do not match the graph");
  }
  const uint64_t* gradients = reader.words(graph.outputs.size(), "gradients");
  const uint64_t* addresses = reader.words(graph.leaves.size(), "addresses");
  reader.finish("backward");
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
    if (poisoned != nullptr) return poison(addresses, graph.leaves.size(), poisoned);
    const AboveAutograd above;
    const int64_t start = transport::nowNs();
    const auto found_gradients =
        torch::autograd::grad(outputs, graph.leaves, seeds, /*retain_graph=*/true,
                              /*create_graph=*/false, /*allow_unused=*/true);
    busy_ns_ += transport::nowNs() - start;
    if (speed_ < 1.0) throttle(transport::nowNs() - start);
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
    poison(addresses, graph.leaves.size(),
           describe(std::current_exception(), sequence, operator_name_));
    throw;
  }
}

}  // namespace shoal::worker
