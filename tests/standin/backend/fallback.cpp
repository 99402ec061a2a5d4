// Every operator that has no kernel of its own here: its CPU kernel, queued, on the aliases.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "call.h"

namespace standin {
namespace {

// How many numbers a random operator may draw: enough for its largest tensor.
uint64_t numbersOf(const Call& call, const std::vector<at::Tensor>& made) {
  uint64_t numbers = 1;
  for (const Argument& argument : call.arguments()) {
    numbers = std::max(numbers, static_cast<uint64_t>(argument.tensor.numel()));
  }
  for (const at::Tensor& tensor : made) {
    numbers = std::max(numbers, static_cast<uint64_t>(tensor.numel()));
  }
  return numbers;
}

struct Prepared {
  torch::jit::Stack stack;
  std::optional<uint64_t> seed;
};

// The call on the CPU, with aliases for device tensors. Consumes the generator's numbers.
Prepared prepare(const Call& call, const std::vector<at::Tensor>& made, Aliases& aliases) {
  Prepared prepared;
  std::optional<at::Generator> generator;
  if (call.draws() || call.generator().has_value()) {
    prepared.seed = drawFrom(call.generator(), call.device(), numbersOf(call, made));
    generator = at::detail::createCPUGenerator(*prepared.seed);
  }
  prepared.stack = call.on([&](const at::Tensor& tensor) { return aliases.of(tensor); }, generator);
  return prepared;
}

// What the call returns depends on values: it runs now, and its results are copied to the device.
void runWaiting(const Call& call, torch::jit::Stack* stack) {
  // Outputs may grow, which aliases cannot: they are copied back.
  Aliases aliases;
  std::vector<at::Tensor> stood_for;
  Prepared prepared = prepare(call, {}, aliases);
  size_t number = 0;
  const torch::jit::Stack real = call.on(
      [&](const at::Tensor& tensor) {
        at::Tensor alias = aliases.of(tensor);
        stood_for.push_back(call.arguments()[number++].writes ? at::Tensor() : alias);
        return alias;
      },
      std::nullopt);
  Outline outline;
  std::vector<at::Tensor> fresh;
  runNow(call.device(), call.name(), call.accesses(), [&] {
    const OnCpu on_cpu(at::get_num_threads());
    size_t at = 0;
    std::vector<at::Tensor> copies;
    torch::jit::Stack own = call.on(
        [&](const at::Tensor&) {
          if (!stood_for[at].defined()) {
            stood_for[at] = aliases.of(call.arguments()[at].tensor).clone();
          }
          return stood_for[at++];
        },
        prepared.seed ? std::optional(at::detail::createCPUGenerator(*prepared.seed))
                      : std::nullopt);
    invoke(call.op(), own, prepared.seed);
    outline = outlineFrom(call, own, stood_for);
    fresh = freshOf(outline, own);
  });
  for (const Reshaped& changed : outline.reshaped) {
    reshapeOutput(call.arguments()[changed.number].tensor, changed.sizes, changed.strides);
  }
  std::vector<at::Tensor> made;
  *stack = call.results(outline, made);
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  std::vector<Access> accesses;
  const auto copy = [&](const at::Tensor& to, const at::Tensor& from) {
    copies.emplace_back(Aliases().of(to), from);
    accesses.push_back(accessOf(to, true));
  };
  for (size_t i = 0; i < made.size(); ++i) copy(made[i], fresh[i]);
  for (size_t i = 0; i < stood_for.size(); ++i) {
    if (call.arguments()[i].writes) copy(call.arguments()[i].tensor, stood_for[i]);
  }
  if (copies.empty()) return;
  launchOn(call.device(), call.name() + " (results)", std::move(accesses), [copies] {
    const OnCpu on_cpu(at::get_num_threads());
    for (const auto& [to, from] : copies) to.copy_(from);
  });
}

void queue(const Call& call, const Outline& outline, torch::jit::Stack* stack) {
  for (const Reshaped& changed : outline.reshaped) {
    reshapeOutput(call.arguments()[changed.number].tensor, changed.sizes, changed.strides);
  }
  std::vector<at::Tensor> made;
  *stack = call.results(outline, made);
  if (made.empty() && call.arguments().empty()) return;
  bool only_views = made.empty();
  for (const Argument& argument : call.arguments()) only_views = only_views && !argument.writes;
  if (only_views && !outline.outputs.empty()) return;

  Aliases aliases;
  Prepared prepared = prepare(call, made, aliases);
  std::vector<at::Tensor> targets;
  std::vector<Access> accesses = call.accesses();
  for (const at::Tensor& tensor : made) {
    targets.push_back(Aliases().of(tensor));
    accesses.push_back(accessOf(tensor, true));
  }
  const int threads = at::get_num_threads();
  launchOn(call.device(), call.name(), std::move(accesses),
           [op = call.op(), arguments = std::move(prepared.stack), seed = prepared.seed, targets,
            &outline, threads] {
             const OnCpu on_cpu(threads);
             torch::jit::Stack stack = arguments;
             invoke(op, stack, seed);
             const std::vector<at::Tensor> fresh = freshOf(outline, stack);
             TORCH_CHECK(fresh.size() == targets.size(), "an operator returned other outputs than ",
                         "on zeros");
             for (size_t i = 0; i < fresh.size(); ++i) {
               TORCH_CHECK(fresh[i].sizes() == targets[i].sizes(), "an operator returned sizes ",
                           fresh[i].sizes(), ", on zeros ", targets[i].sizes());
               targets[i].copy_(fresh[i]);
             }
           });
}

}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const Call call(op, torch::jit::last(*stack, count).vec());
  torch::jit::drop(*stack, count);
  const c10::DeviceGuard guard(c10::Device(c10::kCUDA, call.device()));
  torch::jit::Stack results;
  const Outline* outline = call.dependsOnValues() ? nullptr : &outlineOf(call);
  if (outline == nullptr || outline->unknown) {
    runWaiting(call, &results);
  } else {
    queue(call, *outline, &results);
  }
  for (auto& result : results) stack->push_back(std::move(result));
}

}  // namespace standin

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&standin::fallback>());
}
