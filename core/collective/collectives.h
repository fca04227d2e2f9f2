#pragma once

#include <cstddef>
#include <span>

#include "base/export.h"
#include "collective/exchange.h"
#include "collective/operation.h"

namespace multiring {

// Each runs one collective in the calling thread and returns when this rank may use its result and change its
// input. All raise mismatch, timeout, peer lost or aborted errors.

MULTIRING_API void allreduce(Exchange& exchange, const OperationCall& call, Operation& operation);
MULTIRING_API void reduce_scatter(Exchange& exchange, const OperationCall& call, Operation& operation);
MULTIRING_API void allgather(Exchange& exchange, const OperationCall& call, Operation& operation);
MULTIRING_API void gather(Exchange& exchange, const OperationCall& call, Operation& operation);
MULTIRING_API void broadcast(Exchange& exchange, const OperationCall& call, Operation& operation);
MULTIRING_API void scatter(Exchange& exchange, const OperationCall& call, Operation& operation);
MULTIRING_API void alltoall(Exchange& exchange, const OperationCall& call, Operation& operation);
MULTIRING_API void barrier(Exchange& exchange, const OperationCall& call, Operation& operation);

/// Several allreduces of the same dtype and reduction in one pass. `call.descriptor` is fused_descriptor() of
/// them.
MULTIRING_API void fused_allreduce(Exchange& exchange, const OperationCall& call,
                                   std::span<Operation* const> operations);
MULTIRING_API Descriptor fused_descriptor(std::span<Operation* const> operations);

}  // namespace multiring
