#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/export.h"

namespace multiring {

/// Version of the messages between ranks and of their shared memory. Increment it with each change, or ranks
/// of different builds wait for each other until the deadline.
inline constexpr std::uint32_t kProtocol = 17;

/// "multiring 0.1.0 (protocol 6.424)", which has to be the same on all ranks. `layout`: size of
/// what they share in memory.
MULTIRING_API std::string build_text(std::size_t layout);

}  // namespace multiring
