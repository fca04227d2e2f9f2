#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <utility>

#include "base/export.h"
#include "topology/chunks.h"
#include "topology/plan.h"

namespace multiring {

/// What a receiver does with what it gets, and a sender with what it has sent.
enum class TransferKind {
  kHandOver,  ///< the receiver adds it to what it has; the sender drops it
  kExchange,  ///< the receiver adds it; the sender keeps it, and receives the receiver's part
  kResult,    ///< the finished sum, which the receiver copies
};

/// A message of a plan. A rank that sends and receives in a hop sends what it had before the hop.
struct Transfer {
  int from = 0;  ///< rank
  int to = 0;    ///< rank
  Range range;   ///< of elements; never empty
  TransferKind kind = TransferKind::kHandOver;
  int channel = -1;       ///< index into Plan::channels(); -1: the memory of a host
  std::size_t bytes = 0;  ///< on the wire
};

/// Number of hops of a step, each of which needs what the one before has received.
MULTIRING_API int hop_count(const Step& step);

/// Calls `visit` for every transfer of a hop of a step.
MULTIRING_API void for_each_transfer(const Plan& plan, const Step& step, int hop,
                                     const std::function<void(const Transfer&)>& visit);

/// The same of one group of the step.
MULTIRING_API void for_each_transfer(const Plan& plan, const Step& step, const Group& group, int hop,
                                     const std::function<void(const Transfer&)>& visit);

/// Two hosts without a link, of which a plan of `options` for any number of elements sends from the first to
/// the second; none: it can run.
MULTIRING_API std::optional<std::pair<int, int>> missing_link(const Cluster& cluster, PlanOptions options);

}  // namespace multiring
