#pragma once

#include <cstddef>
#include <vector>

#include "base/arithmetic/order.h"
#include "base/export.h"
#include "topology/canonical_tree.h"
#include "topology/chunks.h"
#include "topology/plan.h"

namespace multiring {

/// What one rank does in a plan across hosts: messages and additions on its workspace. Offsets in it are
/// multiples of a cache line except within messages of several sums.
struct RankSchedule {
  /// The sum of a node over a range of elements.
  struct Sum {
    Subtree node;
    std::size_t offset = 0;  ///< of the first element, in the workspace
  };
  struct Bytes {
    std::size_t offset = 0;
    std::size_t size = 0;
  };
  struct Message {
    int peer = 0;
    std::vector<Bytes> parts;  ///< one after the other; a message to be received has one
  };
  struct Join {
    Range range;               ///< of elements
    std::vector<Sum> inputs;   ///< ascending and disjoint
    std::vector<Sum> outputs;  ///< one where the order is any: of all inputs
  };
  /// One hop of messages of the plan, then additions of what came.
  struct Step {
    std::vector<Message> sends;
    std::vector<Message> receives;
    std::vector<Join> joins;
  };

  Order order = Order::kCanonical;
  /// The elements that each rank of the host adds for it, by local rank; may be empty.
  std::vector<Range> host_shares;
  Range share;                 ///< this rank's
  Range block;                 ///< of what is no allreduce: the elements that are this rank's own
  std::vector<Sum> host_sums;  ///< its sums of the host's contributions, for `share`
  std::vector<Step> steps;     ///< as many on every rank
  std::size_t result = 0;      ///< offset of the results for `share`
  std::size_t bytes = 0;       ///< of the workspace
};

/// The part of `rank` in `plan`.
MULTIRING_API RankSchedule make_schedule(const Plan& plan, int rank);

}  // namespace multiring
