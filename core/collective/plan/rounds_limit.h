#pragma once

#include <cstddef>

#include "base/export.h"

namespace multiring {

/// The largest allreduce across hosts, in bytes, that uses rounds where no mode is forced and no tuning is
/// given. Raises a usage error for fewer than one rank, or no staging memory.
MULTIRING_API std::size_t rounds_up_to(int ranks, std::size_t staging_bytes);

/// Whether an allreduce of so many bytes uses rounds there. `rounded`: by comm_dtype.
MULTIRING_API bool uses_rounds(std::size_t bytes, int ranks, std::size_t staging_bytes, bool rounded);

}  // namespace multiring
