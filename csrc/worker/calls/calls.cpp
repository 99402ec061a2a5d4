#include "worker/calls/calls.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/TensorImpl.h>
#include <time.h>

#include <cstring>

#include "base/clock.h"
#include "wire/limits.h"
#include "worker/calls/tensors.h"
#include "worker/failure/failure.h"

namespace shoal::worker {

using wire::OutputKind;
using wire::ProtocolError;
using wire::Tag;

namespace {

bool sameLayout(const Shape& shape, const at::Tensor& tensor) {
  if (tensor.sizes() != at::IntArrayRef(shape.sizes)) return false;
  if (tensor.numel() == 0) return true;
  for (size_t i = 0; i < shape.sizes.size(); ++i) {
    if (shape.sizes[i] != 1 && tensor.stride(static_cast<int64_t>(i)) != shape.strides[i])
      return false;
  }
  return true;
}

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
    entry.row = profile_.row(message, *entry.call);
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
                        " immediates, the prepared call has " +
                        std::to_string(prepared.immediate_words));
  }
  const bool learning = (message.flags & wire::kFlagLearn) != 0;
  if (!learning && outputs.size() != prepared.fresh_outputs) {
    throw ProtocolError("the call names " + std::to_string(outputs.size()) +
                        " outputs, the prepared call has " +
                        std::to_string(prepared.fresh_outputs));
  }
  Run state;
  state.immediates = message.immediates.data();
  state.record = (message.flags & wire::kFlagRecord) != 0;
  state.lease_random = (message.flags & wire::kFlagLeaseRandom) != 0;
  try {
    return run(found->second, state, message);
  } catch (...) {
    poison(outputs, describe(std::current_exception(), sequence, operator_name_));
    throw;
  }
}

std::optional<std::vector<uint64_t>> Calls::run(Entry& entry, Run& run, const wire::Call& message) {
  const PreparedCall& prepared = *entry.call;
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
  entry.row.count(message.immediates.data(), invoke(prepared, run));
  if (run.record) keepGraph(message.graph, run, entry.row);
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

int64_t Calls::invoke(const PreparedCall& prepared, Run& run) {
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
  return speed_ < 1.0 ? static_cast<int64_t>(static_cast<double>(took_ns) / speed_) : took_ns;
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

}  // namespace shoal::worker
