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
using wire::tagWord;

void CallTemplate::build(const OperatorInfo& info, c10::ArrayRef<c10::IValue> arguments,
                         bool record) {
  key_.clear();
  immediates_.clear();
  uses_.clear();
  places_.clear();
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
    key_.push_back(tagWord(Tag::kNone));
  } else if (value.isInt()) {
    key_.push_back(tagWord(number ? Tag::kIntFree : Tag::kInt));
    (number ? immediates_ : key_).push_back(static_cast<uint64_t>(value.toInt()));
  } else if (value.isDouble()) {
    const bool keyed = info_->number_decides_shape || info_->constant_answer;
    key_.push_back(tagWord(keyed ? Tag::kFloatKeyed : Tag::kFloat));
    (keyed ? key_ : immediates_).push_back(wire::asWord(value.toDouble()));
  } else if (value.isBool()) {
    key_.push_back(tagWord(Tag::kBool, value.toBool() ? 1 : 0));
  } else if (value.isComplexDouble()) {
    const auto z = value.toComplexDouble();
    key_.push_back(tagWord(Tag::kComplex));
    immediates_.push_back(wire::asWord(z.real()));
    immediates_.push_back(wire::asWord(z.imag()));
  } else if (value.isList()) {
    addList(value, number);
  } else if (value.isDevice()) {
    key_.push_back(tagWord(Tag::kDevice));
  } else if (value.isString()) {
    addString(value.toStringRef());
  } else if (value.isGenerator()) {
    key_.push_back(tagWord(Tag::kGenerator));
    generator_ = generatorNumber(value.toGenerator(), *session_, index_);
    has_generator_ = true;
    immediates_.push_back(generator_);
  } else if (value.isSymInt()) {
    key_.push_back(tagWord(Tag::kInt));
    key_.push_back(static_cast<uint64_t>(value.toSymInt().guard_int(__FILE__, __LINE__)));
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, info_->name, ": an argument of type ", value.tagKind(),
                                " cannot be sent to a shoal device");
  }
}

void CallTemplate::addTensor(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    key_.push_back(tagWord(Tag::kUndefined));
    return;
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
    places_.push_back(static_cast<uint32_t>(immediates_.size()));
  }
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  const uint8_t flags = (tensor.is_conj() ? wire::kTensorConj : 0) |
                        (tensor.is_neg() ? wire::kTensorNeg : 0) |
                        (record_ && tensor.requires_grad() ? wire::kTensorRequiresGrad : 0);
  key_.push_back(tagWord(Tag::kTensor, static_cast<uint8_t>(tensor.scalar_type()),
                         static_cast<uint8_t>(sizes.size()), flags));
  key_.insert(key_.end(), sizes.begin(), sizes.end());
  key_.insert(key_.end(), strides.begin(), strides.end());
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
    key_.push_back(tagWord(Tag::kHostScalar, static_cast<uint8_t>(plain.scalar_type()), 0,
                           wrapped ? wire::kTensorWrapped : 0));
    immediates_.push_back(value[0]);
    immediates_.push_back(value[1]);
    return;
  }
  if (info_->takes_host_tensor && tensor.device().is_cpu() && tensor.dim() == 1 &&
      tensor.nbytes() <= wire::kHostTensorBytesMax) {
    return addSmallHostTensor(tensor.contiguous());
  }
  TORCH_CHECK(info_->takes_host_index && tensor.device().is_cpu(),
              "Expected all tensors to be on the same device, but found at least two: ", device(),
              " and ", tensor.device(), " (in ", info_->name, "). Move it with .to(\"shoal\").");
  needs_upload_ = true;
}

void CallTemplate::addSmallHostTensor(const at::Tensor& tensor) {
  key_.push_back(tagWord(Tag::kHostTensor, static_cast<uint8_t>(tensor.scalar_type()), 1, 0,
                         static_cast<uint32_t>(tensor.nbytes())));
  key_.push_back(static_cast<uint64_t>(tensor.size(0)));
  const size_t start = key_.size();
  key_.resize(start + (tensor.nbytes() + 7) / 8, 0);
  std::memcpy(key_.data() + start, tensor.const_data_ptr(), tensor.nbytes());
}

void CallTemplate::addList(const c10::IValue& value, bool number) {
  const auto items = value.toListRef();
  TORCH_CHECK(items.size() <= wire::kListLengthMax, info_->name, ": a list of ", items.size(),
              " items is too long");
  key_.push_back(tagWord(Tag::kList, 0, 0, 0, static_cast<uint32_t>(items.size())));
  for (const c10::IValue& item : items) {
    // Lists of floats stay in the key: scale factors decide shapes.
    if (item.isDouble() && !number) {
      key_.push_back(tagWord(Tag::kFloatKeyed));
      key_.push_back(wire::asWord(item.toDouble()));
    } else {
      add(item, number);
    }
  }
}

void CallTemplate::addString(const std::string& text) {
  TORCH_CHECK(text.size() <= wire::kStringBytesMax, info_->name, ": a string is too long");
  key_.push_back(tagWord(Tag::kString, 0, 0, 0, static_cast<uint32_t>(text.size())));
  const size_t start = key_.size();
  key_.resize(start + (text.size() + 7) / 8, 0);
  std::memcpy(key_.data() + start, text.data(), text.size());
}

}  // namespace shoal::client
