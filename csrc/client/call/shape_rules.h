// Shape rules of frequent operators for which torch has no C++ shape function. An operator without
// a rule is asked of the worker once per shape, which is exact but waits for all work before it: a
// program whose shapes change (batches of other sizes, padded text) would march in step with its
// device.
//
// A rule answers only where it is sure of sizes and dtypes: else, and where the arguments are
// wrong, it leaves the question to the worker. Strides are those of local torch as far as is known;
// where the worker finds others, it copies.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "client/member/call_cache.h"

namespace shoal::client {

using RuleArguments = c10::ArrayRef<c10::IValue>;
using ShapeRule = bool (*)(RuleArguments, std::vector<OutputMeta>&);

bool applyShapeRule(const std::string& name, RuleArguments arguments,
                    std::vector<OutputMeta>& outputs);

// The rules of layers: convolution, normalisation, pooling and attention. Null if there is none.
ShapeRule layerRule(const std::string& name);

OutputMeta contiguousMeta(at::IntArrayRef sizes, c10::ScalarType dtype);
// The same in another order; a format that these sizes cannot have is the ordinary one.
OutputMeta packedMeta(at::IntArrayRef sizes, c10::ScalarType dtype, at::MemoryFormat format);
bool isDefinedTensor(const c10::IValue& value);

}  // namespace shoal::client
