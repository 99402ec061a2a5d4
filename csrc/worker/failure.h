// Turns whatever an operator throws into a Failure that can travel, and names it.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "worker/segments.h"

namespace shoal::worker {

std::shared_ptr<const Failure> describe(std::exception_ptr error, uint64_t sequence,
                                        const std::string& operator_name);

}  // namespace shoal::worker
