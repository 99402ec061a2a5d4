// Shape rules of frequent operators for which torch has no C++ shape function. An operator without
// a rule is asked of the worker once per shape, which is exact but waits.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "client/call_cache.h"

namespace shoal::client {

bool applyShapeRule(const std::string& name, c10::ArrayRef<c10::IValue> arguments,
                    std::vector<OutputMeta>& outputs);

}  // namespace shoal::client
