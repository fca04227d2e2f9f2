#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/export.h"

namespace multiring {

/// Counts the changes of what ranks send each other and of what lies in memory that they share: raise it with
/// each, or ranks of different builds wait in different protocols until the deadline, and blame each other.
inline constexpr std::uint32_t kProtocol = 3;

/// "multiring 0.1.0 (protocol 3.424)", which has to be the same on all ranks. `layout`: bytes of what they
/// lay into each other's memory.
MULTIRING_API std::string build_text(std::size_t layout);

}  // namespace multiring
