#pragma once

#include <string>

#include "collective/operation.h"

namespace multiring {

/// Raises a usage error that names the operation.
[[noreturn]] void throw_usage(const Operation& operation, const std::string& message);

/// Raises a usage error if rank `rank` of `size` cannot issue `operation`, before anything is sent.
void validate(const Operation& operation, int rank, int size, const std::string& communicator);

}  // namespace multiring
