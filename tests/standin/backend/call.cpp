#include "call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <mutex>

namespace standin {
namespace {

// These write arguments that their schemas do not mark.
bool writesUnmarked(const std::string& name, size_t argument, const torch::jit::Stack& stack) {
  if (name == "aten::native_batch_norm" || name == "aten::_batch_norm_impl_index") {
    return (argument == 3 || argument == 4) && stack[5].toBool();
  }
  return false;
}

void append(std::string& key, const void* data, size_t bytes) {
  key.append(static_cast<const char*>(data), bytes);
}

void appendTensor(std::string& key, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    key += 'u';
    return;
  }
  key += tensor.is_cpu() ? 'c' : 't';
  key += static_cast<char>(tensor.scalar_type());
  key += static_cast<char>(tensor.is_conj() * 2 + tensor.is_neg() +
                           tensor.unsafeGetTensorImpl()->is_wrapped_number() * 4);
  key += static_cast<char>(tensor.dim());
  append(key, tensor.sizes().data(), tensor.sizes().size() * 8);
  append(key, tensor.strides().data(), tensor.strides().size() * 8);
  // Whether an output has room decides nothing; whether it has memory at all does.
  key += tensor.storage().nbytes() == 0 ? 'e' : 'm';
}

void appendValue(std::string& key, const c10::IValue& value) {
  if (value.isTensor()) return appendTensor(key, value.toTensor());
  if (value.isList()) {
    const auto items = value.toListRef();
    key += '[' + std::to_string(items.size());
    for (const auto& item : items) appendValue(key, item);
    return;
  }
  if (value.isGenerator()) {
    key += 'g';
  } else if (value.isInt()) {
    const int64_t number = value.toInt();
    key += 'i';
    append(key, &number, 8);
  } else if (value.isDouble()) {
    const double number = value.toDouble();
    key += 'd';
    append(key, &number, 8);
  } else {
    std::ostringstream text;
    text << '|' << value.tagKind() << ' ' << value << '|';
    key += text.str();
  }
}

c10::IValue replace(const c10::IValue& value,
                    const std::function<at::Tensor(const at::Tensor&)>& replaced) {
  const auto one = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    return tensor.is_cuda() ? replaced(tensor) : tensor.clone();
  };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> items;
    for (const at::Tensor& item : value.toTensorVector()) items.push_back(one(item));
    return items;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> items;
    for (const auto& item : value.toListRef()) {
      items.push_back(item.isNone() ? std::nullopt : std::optional(one(item.toTensor())));
    }
    return items;
  }
  if (value.isDevice()) return c10::Device(c10::kCPU);
  return value;
}

}  // namespace

Call::Call(const c10::OperatorHandle& op, torch::jit::Stack arguments)
    : op_(op), stack_(std::move(arguments)) {
  const auto& schema = op_.schema().arguments();
  for (size_t i = 0; i < stack_.size(); ++i) {
    const auto* alias = schema[i].alias_info();
    find(stack_[i], (alias != nullptr && alias->isWrite()) || writesUnmarked(name(), i, stack_));
  }
  if (device_ < 0) device_ = currentDeviceIndex();
}

void Call::find(const c10::IValue& value, bool writes) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return;
    if (!tensor.is_cuda()) {
      TORCH_CHECK(!writes, "the stand-in does not write CPU tensors in ", name());
      return;
    }
    if (device_ < 0) device_ = tensor.device().index();
    tensors_.push_back({tensor, writes});
  } else if (value.isList()) {
    for (const auto& item : value.toListRef()) find(item, writes);
  } else if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index()) {
    device_ = value.toDevice().index();
  }
}

std::string Call::key() const {
  std::string key = name() + '.' + op_.schema().overload_name();
  key += static_cast<char>(c10::typeMetaToScalarType(at::get_default_dtype()));
  for (const auto& value : stack_) appendValue(key, value);
  return key;
}

torch::jit::Stack Call::on(const std::function<at::Tensor(const at::Tensor&)>& replaced,
                           const std::optional<at::Generator>& generator) const {
  torch::jit::Stack stack;
  const auto& schema = op_.schema().arguments();
  for (size_t i = 0; i < stack_.size(); ++i) {
    const bool is_generator =
        stack_[i].isGenerator() ||
        (generator.has_value() && schema[i].name() == "generator" && stack_[i].isNone());
    if (is_generator && generator.has_value()) {
      stack.emplace_back(*generator);
    } else {
      stack.push_back(replace(stack_[i], replaced));
    }
  }
  return stack;
}

std::vector<Access> Call::accesses() const {
  std::vector<Access> found;
  for (const Argument& argument : tensors_) {
    found.push_back(accessOf(argument.tensor, argument.writes));
  }
  return found;
}

bool Call::dependsOnValues() const {
  if (op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output)) {
    return true;
  }
  if (name() != "aten::index") return false;  // by a mask: as many as it selects
  for (const auto& index : stack_[1].toListRef()) {
    if (!index.isTensor() || !index.toTensor().defined()) continue;
    const at::ScalarType type = index.toTensor().scalar_type();
    if (type == at::kBool || type == at::kByte) return true;
  }
  return false;
}

std::optional<at::Generator> Call::generator() const {
  for (const auto& value : stack_) {
    if (value.isGenerator()) return value.toGenerator();
  }
  return std::nullopt;
}

at::Tensor Call::result(const Output& output, std::vector<at::Tensor>& made) const {
  switch (output.kind) {
    case Output::kArgument:
      return tensors_.at(output.number).tensor;
    case Output::kView: {
      const at::Tensor& base = tensors_.at(output.number).tensor;
      at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(base.storage()), base.key_set(), at::scalarTypeToTypeMeta(output.dtype));
      const auto item = static_cast<int64_t>(view.itemsize());
      const auto start = base.storage_offset() * static_cast<int64_t>(base.itemsize());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(output.sizes, output.strides,
                                                        start / item + output.offset);
      return view;
    }
    case Output::kFresh:
      made.push_back(emptyLike(output.sizes, output.strides, output.dtype, {c10::kCUDA, device_}));
      return made.back();
    default:
      return {};
  }
}

torch::jit::Stack Call::results(const Outline& outline, std::vector<at::Tensor>& made) const {
  torch::jit::Stack stack;
  for (size_t i = 0; i < outline.outputs.size(); ++i) {
    const Output& output = outline.outputs[i];
    if (output.kind == Output::kValue) {
      stack.push_back(output.value);
    } else if (output.kind == Output::kList) {
      c10::List<at::Tensor> items;
      for (size_t item = 0; item < output.number; ++item) {
        items.push_back(result(outline.outputs[++i], made));
      }
      stack.emplace_back(items);
    } else {
      stack.emplace_back(result(output, made));
    }
  }
  return stack;
}

OnCpu::OnCpu(int threads)
    : no_autocast_(
          c10::DispatchKeySet({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA,
                               c10::DispatchKey::AutocastPrivateUse1})) {
  if (at::get_num_threads() != threads) at::set_num_threads(threads);
}

void invoke(const c10::OperatorHandle& op, torch::jit::Stack& stack,
            const std::optional<uint64_t>& seed) {
  if (!seed.has_value()) return op.callBoxed(stack);
  // Operators without an argument for it draw from the CPU's default generator.
  static std::mutex lock;
  const std::lock_guard guard(lock);
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const at::Tensor before = generator.get_state();
  generator.set_current_seed(*seed);
  try {
    op.callBoxed(stack);
  } catch (...) {
    generator.set_state(before);
    throw;
  }
  generator.set_state(before);
}

}  // namespace standin
