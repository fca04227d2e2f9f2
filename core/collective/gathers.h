#pragma once

#include <vector>

#include "collective/exchange.h"
#include "collective/operation.h"
#include "collective/staged/staged_copy.h"

namespace multiring {

/// Places the pieces of all ranks one after the other in the operation's output (allocated if there is none),
/// after checking its size; fills `operation.received`. `rows[r]`: rows that come from rank r.
std::vector<StagedCopy::Incoming> join_rows(const Exchange& exchange, const OperationCall& call,
                                            Operation& operation, const std::vector<std::uint64_t>& rows,
                                            std::size_t row_bytes);

}  // namespace multiring
