#pragma once

#include "base/export.h"
#include "collective/exchange.h"
#include "collective/operation.h"

namespace multiring {

/// Whether an operation is an average of integers, whose sum may not fit into their type (int8: 127 + 127).
MULTIRING_API bool averages_integers(const Descriptor& descriptor);

/// Averages integers over all ranks, truncated toward zero, without overflow.
///
/// Every rank widens what it contributes to int64 (an element of 64 bits to two of them, its upper and lower
/// halves), the collective adds these, and every rank divides what it gets.
///
/// `operation`: one for which averages_integers() holds.
void average_integers(Exchange& exchange, const OperationCall& call, Operation& operation);

}  // namespace multiring
