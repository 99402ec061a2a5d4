// Synchronous calls: their reply says what the outputs are, and a later message names them.
#include <ATen/Functions.h>

#include "wire/layout.h"
#include "wire/limits.h"
#include "worker/calls/calls.h"
#include "worker/calls/tensors.h"

namespace shoal::worker {

using wire::OutputKind;
using wire::ProtocolError;
using wire::Tag;

namespace {

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

}  // namespace shoal::worker
