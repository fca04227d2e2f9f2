#pragma once

#include <functional>
#include <span>

#include "collective/exchange.h"
#include "collective/operation.h"

namespace multiring {

/// Allreduce in any order of arrays on devices of several hosts, which have as many ranks each, that all
/// ranks have agreed to run so (NcclGroups::prepare):
///
///   1. NCCL reduce-scatters within each host,
///   2. each rank copies its share to pinned memory, and adds it to those of the other hosts, by a plan among
///      the ranks with the same local number (cluster/plan_run.h); as many plans run at once as a host has
///      ranks,
///   3. each rank copies its share back, and NCCL allgathers within each host.
///
/// Calls `meanwhile` during the first. `pieces`: what lies on the device. `mode`: by which the whole array
/// would cross hosts.
void hierarchical_allreduce(Exchange& exchange, const OperationCall& call, const Operation& operation,
                            std::span<const Piece> pieces, const Mode& mode,
                            const std::function<void()>& meanwhile);

}  // namespace multiring
