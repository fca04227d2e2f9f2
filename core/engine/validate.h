#pragma once

#include <string>

#include "collective/operation.h"
#include "engine/work.h"

namespace multiring {

/// Raises a usage error that names the operation.
[[noreturn]] void throw_usage(const Operation& operation, const std::string& message);

/// Raises what calls get after the first error of `what` ("communicator 'world'") on rank `rank`: that error,
/// if the program has not been told of it yet, or else that `what` is broken.
[[noreturn]] void throw_broken(const std::string& what, int rank, const Error& first_error,
                               const ErrorSeen& error_seen);

/// Raises a usage error if rank `rank` of `size` cannot issue `operation`, before anything is sent.
void validate(const Operation& operation, int rank, int size, const std::string& communicator);

}  // namespace multiring
