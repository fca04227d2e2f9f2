#pragma once

#include <cstddef>
#include <memory>

#include "base/unique_fd.h"
#include "transport/shared/host_group.h"

namespace multiring {

/// An anonymous file in memory: no name, so nothing to leak, and no share of /dev/shm's size limit.
UniqueFd create_memory_file(std::size_t bytes);

/// Maps such a file, shared. The mapping outlives the descriptor.
std::shared_ptr<SharedBlock> map_memory_file(const UniqueFd& file, std::size_t bytes);

}  // namespace multiring
