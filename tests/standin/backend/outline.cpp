// What a call will return, before it has run: from one run on zeros, kept by the call's key.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <memory>
#include <mutex>
#include <unordered_map>

#include "call.h"

namespace standin {
namespace {

constexpr size_t kOutlinesMax = 50000;

at::Tensor zerosLike(const at::Tensor& tensor) {
  at::Tensor zeros =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  zeros.zero_();
  auto* impl = zeros.unsafeGetTensorImpl();
  impl->_set_conj(tensor.is_conj());
  impl->_set_neg(tensor.is_neg());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return zeros;
}

Output describe(const at::Tensor& result, const std::vector<at::Tensor>& stood_for) {
  Output output;
  if (!result.defined()) return output;
  if (result.layout() != c10::kStrided) {  // such tensors stay on the CPU: Shoal refuses them
    output.kind = Output::kValue;
    output.value = result;
    return output;
  }
  output.dtype = result.scalar_type();
  output.sizes = result.sizes().vec();
  output.strides = result.strides().vec();
  output.kind = Output::kFresh;
  for (size_t i = 0; i < stood_for.size(); ++i) {
    const at::Tensor& argument = stood_for[i];
    if (result.is_same(argument)) {
      output.kind = Output::kArgument;
      output.number = i;
      return output;
    }
    if (output.kind == Output::kFresh && result.has_storage() && argument.has_storage() &&
        result.storage().is_alias_of(argument.storage())) {
      output.kind = Output::kView;
      output.number = i;
      output.offset = result.storage_offset() - argument.storage_offset() *
                                                    static_cast<int64_t>(argument.itemsize()) /
                                                    static_cast<int64_t>(result.itemsize());
    }
  }
  return output;
}

Outline dryRun(const Call& call) {
  std::vector<at::Tensor> stood_for;
  std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> before;
  const OnCpu on_cpu(at::get_num_threads());
  at::Generator generator = at::detail::createCPUGenerator(0);
  torch::jit::Stack stack = call.on(
      [&](const at::Tensor& tensor) {
        stood_for.push_back(zerosLike(tensor));
        return stood_for.back();
      },
      generator);
  Outline outline;
  try {
    invoke(call.op(), stack, call.draws() ? std::optional<uint64_t>(0) : std::nullopt);
  } catch (const c10::Error&) {
    outline.unknown = true;
    return outline;
  }
  outline = outlineFrom(call, stack, stood_for);
  for (const Output& output : outline.outputs) {
    outline.unknown = outline.unknown || (output.kind == Output::kValue && output.value.isTensor());
  }
  return outline;
}

}  // namespace

Outline outlineFrom(const Call& call, const torch::jit::Stack& results,
                    const std::vector<at::Tensor>& stood_for) {
  Outline outline;
  for (const auto& result : results) {
    if (result.isTensor()) {
      outline.outputs.push_back(describe(result.toTensor(), stood_for));
    } else if (result.isTensorList()) {
      const auto items = result.toTensorVector();
      outline.outputs.emplace_back();
      outline.outputs.back().kind = Output::kList;
      outline.outputs.back().number = items.size();
      for (const auto& item : items) outline.outputs.push_back(describe(item, stood_for));
    } else {
      outline.outputs.emplace_back();
      outline.outputs.back().kind = Output::kValue;
      outline.outputs.back().value = result;
    }
  }
  for (size_t i = 0; i < stood_for.size(); ++i) {
    const Argument& argument = call.arguments()[i];
    const at::Tensor& now = stood_for[i];
    if (argument.writes &&
        (now.sizes() != argument.tensor.sizes() || now.strides() != argument.tensor.strides())) {
      outline.reshaped.push_back({i, now.sizes().vec(), now.strides().vec()});
    }
  }
  return outline;
}

std::vector<at::Tensor> freshOf(const Outline& outline, const torch::jit::Stack& results) {
  std::vector<at::Tensor> flat, fresh;
  for (const auto& result : results) {
    if (result.isTensorList()) {
      flat.emplace_back();  // the list itself
      for (const auto& item : result.toTensorVector()) flat.push_back(item);
    } else {
      flat.push_back(result.isTensor() ? result.toTensor() : at::Tensor());
    }
  }
  for (size_t i = 0; i < flat.size() && i < outline.outputs.size(); ++i) {
    if (outline.outputs[i].kind == Output::kFresh) fresh.push_back(flat[i]);
  }
  return fresh;
}

const Outline& outlineOf(const Call& call) {
  static std::mutex lock;
  static std::unordered_map<std::string, std::unique_ptr<Outline>> known;
  const std::string key = call.key();
  {
    const std::lock_guard guard(lock);
    const auto found = known.find(key);
    if (found != known.end()) return *found->second;
  }
  auto made = std::make_unique<Outline>(dryRun(call));
  const std::lock_guard guard(lock);
  // Outlines in use are never freed: a few may be left behind.
  if (known.size() >= kOutlinesMax) {
    for (auto& [unused, outline] : known) outline.release();
    known.clear();
  }
  return *known.emplace(key, std::move(made)).first->second;
}

}  // namespace standin
