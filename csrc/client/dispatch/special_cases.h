// Ways to run operators on wide tensors that are no plain cut.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace shoal::client {

using Arguments = std::vector<c10::IValue>;
using Tensors = std::vector<at::Tensor>;
using Done = std::optional<Tensors>;  // nothing: this call is not of the kind
using Way = Done (*)(const Arguments&);
using Ways = std::unordered_map<std::string, Way>;  // by the operator's name

// Those that pick rows by number (wide_rows.cpp), and those whose parts depend on one another
// (wide_dependent.cpp).
const Ways& rowWays();
const Ways& dependentWays();

struct Rows {
  int64_t start, count;
  at::Tensor block;
};

// The tensor by extents along its first dimension; empty if it does not lie in several that way.
std::vector<Rows> rowsOf(const at::Tensor& tensor);
int64_t wrapped(int64_t dim, int64_t rank);

}  // namespace shoal::client
