// What the client knows of an operator beyond its schema, worked out once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace shoal::client {

struct OperatorInfo {
  explicit OperatorInfo(const c10::OperatorHandle& handle);

  c10::OperatorHandle op;
  std::string name;  // "aten::add.Tensor"
  size_t argument_count = 0;
  std::vector<bool> is_number;        // by argument: a Scalar (or a list of them)
  std::vector<bool> writes;           // by argument: the operator changes it
  std::vector<int> return_of;         // by return: the argument that it is (mutated), or -1
  bool writes_only = false;           // every return is a mutated argument, and none may be resized
  bool has_out = false;               // takes `out=`, which the operator may resize
  bool structured = false;            // torch has a C++ shape function that we can reach
  bool asks_kernel = false;           // which attention kernel: no answer for a captured call
  bool random = false;                // draws random numbers
  bool reads_precisions = false;      // may multiply float32 matrices with less precision
  bool foreach_lists = false;         // `_foreach_` and `_fused_`: what it does, item by item
  bool dynamic = false;               // output shapes depend on data
  bool number_decides_shape = false;  // arange and its kin: Scalars belong to the key
  bool takes_host_index = false;      // index operators accept CPU index tensors
  bool takes_host_tensor = false;  // packed sequences: their batch sizes are on the CPU by contract
};

}  // namespace shoal::client
