#pragma once

#include <cstddef>
#include <cstdint>

#include "base/export.h"

namespace multiring {

/// A number that changes with every bit of the memory, at the speed of memory. Not against attackers.
MULTIRING_API std::uint64_t checksum(const void* data, std::size_t bytes, std::uint64_t seed = 0);

}  // namespace multiring
