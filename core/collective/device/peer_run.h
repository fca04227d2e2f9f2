#pragma once

#include <functional>
#include <span>

#include "collective/exchange.h"
#include "collective/operation.h"
#include "collective/staged/staged_copy.h"
#include "collective/sums/piece_list.h"
#include "topology/chunks.h"

namespace multiring {

// Collectives in peer memory (peer_memory.h), on which all ranks have agreed. A rank copies what it gives to
// its buffer; when all have, it takes what it needs from all buffers; when all have done that, buffers may be
// written again, or go: two synchronisations, as in shared memory. What is longer than a buffer passes in
// segments.

/// Of arrays that lie on the device: each rank reduces its slice of them by a kernel, which writes the result
/// to all buffers, from which the ranks copy it. `meanwhile` is called when the device has begun.
void allreduce_in_peer_memory(Exchange& exchange, const OperationCall& call, const Operation& operation,
                              const PieceList& arrays, const std::function<void()>& meanwhile);

/// Each rank reduces its block. `blocks`: in bytes, by rank.
void reduce_scatter_in_peer_memory(Exchange& exchange, const OperationCall& call, const Operation& operation,
                                   std::span<const Range> blocks);

/// Moves bytes, as StagedCopy does. What a rank has `incoming` of itself is copied as well.
void move_in_peer_memory(Exchange& exchange, const OperationCall& call, const Operation& operation,
                         std::span<const StagedCopy::Outgoing> outgoing,
                         std::span<const StagedCopy::Incoming> incoming, std::size_t longest);

}  // namespace multiring
