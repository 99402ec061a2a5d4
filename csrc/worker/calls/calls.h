// Prepared calls and their execution: builds the arguments of a call from its template and its
// immediates, runs the operator, and binds what it returns to the client's addresses.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "wire/messages.h"
#include "worker/calls/call_profile.h"
#include "worker/calls/device.h"
#include "worker/calls/prepared.h"
#include "worker/failure/failure.h"
#include "worker/paging/segments.h"

namespace shoal::worker {

// Runs an operator on its arguments. The fuzzer replaces it, to test the executor alone.
using RunOperator = void (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);
inline void runOperator(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  op.callBoxed(stack);
}

class Calls {
 public:
  Calls(c10::Device device, double speed, Segments& segments, Generators& generators,
        RunOperator run_operator, transport::SessionBlock* block = nullptr)
      : device_(device),
        speed_(speed),
        segments_(segments),
        generators_(generators),
        run_operator_(run_operator),
        profile_(block) {}

  void prepare(const wire::Prepare& message, uint64_t sequence);
  void forget() {
    prepared_.clear();
    prepared_words_ = 0;
  }
  // Runs a call. A learning call returns what its reply says of the outputs. On failure the outputs
  // are poisoned and the failure is thrown on.
  std::optional<std::vector<uint64_t>> call(const wire::Call& message, uint64_t sequence);
  void bindLearned(const wire::Bind& message);
  void backward(const wire::Backward& message, uint64_t sequence);
  void dropGraph(uint64_t graph) { graphs_.erase(graph); }

  // Which words of a call's immediates are addresses; null if it was not prepared.
  const std::vector<uint32_t>* addressWords(uint32_t id) const {
    const auto found = prepared_.find(id);
    return found == prepared_.end() || !found->second.call ? nullptr
                                                           : &found->second.call->address_words;
  }
  // Name of the operator that ran last, for messages.
  const std::string& operatorName() const { return operator_name_; }
  uint64_t count() const { return count_; }
  int64_t busyNs() const { return busy_ns_; }

 private:
  struct Entry {  // a prepared call, or why there is none
    std::optional<PreparedCall> call;
    std::shared_ptr<const Failure> failure;
    size_t words = 0;
    CallRow row;
  };
  struct Graph {  // a recorded call that waits for its backward
    std::vector<at::Tensor> leaves;
    std::vector<at::Tensor> outputs;
    CallRow row;
  };
  struct Run {  // one call while it runs
    torch::jit::Stack stack;
    std::vector<at::Tensor> leaves;
    std::shared_ptr<const Failure> poison;
    const uint64_t* immediates = nullptr;
    bool record = false;
    bool lease_random = false;
    bool writes = false;  // the operator changes the argument that is being built
  };

  std::optional<std::vector<uint64_t>> run(Entry& entry, Run& run, const wire::Call& message);
  c10::IValue build(const Argument& argument, Run& run);
  c10::IValue buildList(const Argument& argument, Run& run);
  at::Tensor buildTensor(const Shape& shape, Run& run);
  at::Tensor tensorAt(wire::Address address, const Shape& shape, bool writes,
                      std::shared_ptr<const Failure>& poison);
  int64_t invoke(const PreparedCall& prepared, Run& run);
  static int64_t threadCpuNs();
  void throttle(int64_t took_ns);
  void bindOutputs(const PreparedCall& prepared, const torch::jit::Stack& results,
                   wire::Words addresses);
  void bindOutput(const Shape& shape, const at::Tensor& value, wire::Address address);
  void poison(wire::Words addresses, const std::shared_ptr<const Failure>& failure);
  std::vector<uint64_t> learn(const PreparedCall& prepared, const torch::jit::Stack& results,
                              const torch::jit::Stack& arguments, const std::vector<Shape>& before);
  void learnTensor(const at::Tensor& value, const torch::jit::Stack& arguments,
                   const PreparedCall& prepared, std::vector<uint64_t>& payload);
  void keepGraph(uint64_t graph, Run& run, const CallRow& row);

  c10::Device device_;
  double speed_;
  Segments& segments_;
  Generators& generators_;
  RunOperator run_operator_;
  CallProfile profile_;
  std::unordered_map<uint32_t, Entry> prepared_;
  size_t prepared_words_ = 0;  // of all templates; a limit bounds it
  std::unordered_map<uint64_t, Graph> graphs_;
  std::vector<at::Tensor> learned_;  // outputs of the last synchronous call, until kBind names them
  std::string operator_name_;
  uint64_t count_ = 0;
  int64_t busy_ns_ = 0;
  int64_t owed_ns_ = 0;         // time that the slower device would still need
  int64_t worked_seen_ns_ = 0;  // the thread's time at the last look
};

}  // namespace shoal::worker
