#pragma once

#include <cstddef>

#include "base/export.h"

namespace multiring {

/// memcpy for data of any size and alignment, as fast at every distance between the two ranges; see copy.cpp.
/// With no bytes the pointers may be null. The ranges must not overlap.
MULTIRING_API void copy_bytes(void* to, const void* from, std::size_t bytes);

/// copy_bytes past the caches, for memory that is larger than they are and is not read again soon: the
/// processor does not fetch what is about to be overwritten, and keeps what it has cached. The ranges must
/// not overlap.
MULTIRING_API void copy_streaming(void* to, const void* from, std::size_t bytes);

}  // namespace multiring
