#pragma once

#include <string>

#include "base/error.h"
#include "collective/operation.h"
#include "multiring.h"

namespace multiring {

/// The C ABI's structs in the engine's terms, and back.

/// Raises a usage error for an invalid operation.
Operation convert(const mr_operation& asked, int size);
mr_error convert(const Error& error);
Error convert(const mr_error& error);

[[noreturn]] void refuse(const std::string& message);

}  // namespace multiring
