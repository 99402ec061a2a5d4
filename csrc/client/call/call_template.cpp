#include "client/call/call_template.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstring>

#include "client/space/devices.h"
#include "client/tensor/generator.h"
#include "client/tensor/tensor.h"
#include "wire/cursor.h"
#include "wire/limits.h"

namespace shoal::client {

using wire::Tag;

void CallTemplate::build(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments,
                         bool record) {
  key_.clear();
  immediates_.clear();
  uses_.clear();
  address_positions_.clear();
  needs_upload_ = false;
  has_generator_ = false;
  record_ = record;
  info_ = &info;
  chooseDevice(arguments);
  for (size_t i = 0; i < arguments.size(); ++i) {
    writes_ = info.writes[i];
    add(arguments[i], info.is_number[i] && !info.number_decides_shape);
  }
}

void CallTemplate::chooseDevice(c10::ArrayRef<c10::IValue> arguments) {
  const auto takes = [this](const c10::IValue& value) {
    if (!value.isTensor()) return false;
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || !tensor.device().is_privateuseone()) return false;
    session_ = &sessionOf(tensor);
    index_ = tensor.device().index();
    return true;
  };
  index_ = Devices::current();
  for (const auto& value : arguments) {
    if (takes(value)) return;
    if (value.isDevice()) {
      if (value.toDevice().has_index()) index_ = value.toDevice().index();
    } else if (value.isTensorList() || (value.isList() && !value.isIntList())) {
      for (const c10::IValue& item : value.toListRef()) {
        if (takes(item)) return;
      }
    }
  }
  session_ = &Devices::get().sessionWith(index_);
}

void CallTemplate::add(const c10::IValue& value, bool number) {
  if (value.isTensor()) return addTensor(value.toTensor());
  if (value.isNone()) {
    wire::appendTag(key_, Tag::kNone);
  } else if (value.isInt()) {
    addNumber(number ? Tag::kIntFree : Tag::kInt, static_cast<uint64_t>(value.toInt()), !number);
  } else if (value.isDouble()) {
    const bool keyed = info_->number_decides_shape;
    addNumber(keyed ? Tag::kFloatKeyed : Tag::kFloat, wire::asWord(value.toDouble()), keyed);
  } else if (value.isBool()) {
    wire::appendBool(key_, value.toBool());
  } else if (value.isComplexDouble()) {
    const auto z = value.toComplexDouble();
    wire::appendTag(key_, Tag::kComplex);
    immediates_.push_back(wire::asWord(z.real()));
    immediates_.push_back(wire::asWord(z.imag()));
  } else if (value.isList()) {
    addList(value, number);
  } else if (value.isDevice()) {
    wire::appendTag(key_, Tag::kDevice);
  } else if (value.isString()) {
    addString(value.toStringRef());
  } else if (value.isGenerator()) {
    wire::appendTag(key_, Tag::kGenerator);
    generator_ = generatorNumber(value.toGenerator(), *session_, index_);
    has_generator_ = true;
    immediates_.push_back(generator_);
  } else if (value.isSymInt()) {
    const int64_t known = value.toSymInt().guard_int(__FILE__, __LINE__);
    wire::appendValue(key_, Tag::kInt, static_cast<uint64_t>(known));
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, info_->name, ": an argument of type ", value.tagKind(),
                                " cannot be sent to a shoal device");
  }
}

void CallTemplate::addTensor(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return wire::appendTag(key_, Tag::kUndefined);
  }
  if (!tensor.device().is_privateuseone()) return addHostTensor(tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == c10::kStrided && !tensor.is_quantized(), info_->name, ": ",
      tensor.layout(), tensor.is_quantized() ? " quantized" : "",
      " tensors are not supported on shoal devices; use .to_dense() or keep "
      "this part of the program on the CPU");
  const wire::Address base = baseOf(tensor);
  if (tensor.device().index() != index_) raiseOtherDevice(tensor);
  if (base != 0) {
    if (wire::sessionOf(base) != session_->number()) raiseOtherDevice(tensor);
    uses_.push_back({base, writes_});
    address_positions_.push_back(static_cast<uint32_t>(immediates_.size()));
  }
  const uint8_t flags = (tensor.is_conj() ? wire::kTensorConj : 0) |
                        (tensor.is_neg() ? wire::kTensorNeg : 0) |
                        (record_ && tensor.requires_grad() ? wire::kTensorRequiresGrad : 0);
  wire::appendTensor(key_, static_cast<uint8_t>(tensor.scalar_type()), flags, tensor.sizes(),
                     tensor.strides());
  immediates_.push_back(
      base == 0 ? 0 : base + static_cast<uint64_t>(tensor.storage_offset()) * tensor.itemsize());
}

void CallTemplate::raiseOtherDevice(const at::Tensor& tensor) const {
  session_->deviceMember(0).checkUsable();  // one of the two may be of a lease that has ended
  sessionOf(tensor).deviceMember(0).checkUsable();
  TORCH_CHECK(false,
              "Expected all tensors to be on the same device, but found at least two: ", device(),
              " and ", tensor.device(), " (in ", info_->name, ")");
}

// A CPU tensor beside device tensors: a number travels as an immediate, an index is uploaded, and
// anything else is the mistake that torch reports for every device.
void CallTemplate::addHostTensor(const at::Tensor& tensor) {
  if (tensor.dim() == 0 && tensor.device().is_cpu() && tensor.layout() == c10::kStrided) {
    const bool wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    const at::Tensor plain = tensor.resolve_conj().resolve_neg();
    uint64_t value[2] = {0, 0};
    std::memcpy(value, plain.const_data_ptr(), plain.itemsize());
    wire::appendHostScalar(key_, static_cast<uint8_t>(plain.scalar_type()),
                           wrapped ? wire::kTensorWrapped : 0);
    immediates_.push_back(value[0]);
    immediates_.push_back(value[1]);
    return;
  }
  if (info_->takes_host_tensor && tensor.device().is_cpu() && tensor.dim() == 1 &&
      tensor.nbytes() <= wire::kHostTensorBytesMax) {
    const at::Tensor dense = tensor.contiguous();
    return wire::appendHostTensor(key_, static_cast<uint8_t>(dense.scalar_type()), dense.size(0),
                                  dense.const_data_ptr(), dense.nbytes());
  }
  TORCH_CHECK(info_->takes_host_index && tensor.device().is_cpu(),
              "Expected all tensors to be on the same device, but found at least two: ", device(),
              " and ", tensor.device(), " (in ", info_->name, "). Move it with .to(\"shoal\").");
  needs_upload_ = true;
}

// A number is part of the key if it decides shapes, else it travels with each call.
void CallTemplate::addNumber(Tag tag, uint64_t value, bool keyed) {
  if (keyed) return wire::appendValue(key_, tag, value);
  wire::appendTag(key_, tag);
  immediates_.push_back(value);
}

void CallTemplate::addList(const c10::IValue& value, bool number) {
  const auto items = value.toListRef();
  TORCH_CHECK(items.size() <= wire::kListLengthMax, info_->name, ": a list of ", items.size(),
              " items is too long");
  wire::appendList(key_, items.size());
  for (const c10::IValue& item : items) {
    // Lists of floats stay in the key: scale factors decide shapes.
    if (item.isDouble() && !number) {
      wire::appendValue(key_, Tag::kFloatKeyed, wire::asWord(item.toDouble()));
    } else {
      add(item, number);
    }
  }
}

void CallTemplate::addString(const std::string& text) {
  TORCH_CHECK(text.size() <= wire::kStringBytesMax, info_->name, ": a string is too long");
  wire::appendString(key_, text);
}

}  // namespace shoal::client
