#pragma once

#include <cstddef>
#include <string>

#include "call.h"

namespace multiring::xla {

/// Copies between two arrays of a call, on a device as work of its stream. `what`: what it is for, in
/// messages. What fails ends the program, so it returns then as PendingTable::wait_for_all does.
void copy(const Call& call, mr_queue* queue, const Buffer& to, const Buffer& from, const std::string& what);

/// Copies a part of an array that lies on a device to the host, and returns when it is there.
void read(const Call& call, mr_queue* queue, void* to, const std::byte* from, std::size_t bytes,
          const std::string& what);

}  // namespace multiring::xla
