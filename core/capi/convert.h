#pragma once

#include <string>

#include "base/error.h"
#include "collective/operation.h"
#include "multiring.h"

namespace multiring {

/// The C ABI's structs in the engine's terms, and back.

/// Raises a usage error for an invalid operation.
Operation convert(const mr_operation& asked, int size);
/// Memory of a device, which has to be one; none if there are no bytes.
Buffer locate(const Devices& devices, const void* address, std::size_t bytes, void* stream);
mr_error convert(const Error& error);
Error convert(const mr_error& error);

[[noreturn]] void refuse(const std::string& message);

}  // namespace multiring
