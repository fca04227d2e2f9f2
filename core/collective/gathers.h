#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "collective/exchange.h"
#include "collective/operation.h"
#include "collective/staged/staged_copy.h"
#include "device/nccl.h"

namespace multiring {

/// Before a match: tells the others what memory this rank gives for the rows that it receives.
void publish_room(Operation& operation);
/// After it, on all ranks: raises a mismatch error unless that of `rank` has room for `total_of(rank)` bytes
/// and no more.
void require_room(const RoundExchange& exchange, const OperationCall& call,
                  const std::function<std::size_t(int rank)>& total_of);

/// Places the pieces of all ranks one after the other in the operation's output (allocated if there is none),
/// which has room for them; fills `operation.received`. `rows[r]`: rows that come from rank r.
std::vector<StagedCopy::Incoming> join_rows(Operation& operation, const std::vector<std::uint64_t>& rows,
                                            std::size_t row_bytes);

/// What NCCL has for that: a message from each rank to each that it has rows for, by rank, itself among them.
std::vector<nccl::Call> exchange_calls(std::span<const StagedCopy::Outgoing> outgoing,
                                       std::span<const StagedCopy::Incoming> incoming);

}  // namespace multiring
