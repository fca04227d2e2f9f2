#pragma once

#include <cstddef>
#include <vector>

#include "base/export.h"
#include "topology/canonical_tree.h"
#include "topology/chunks.h"
#include "topology/plan.h"

namespace multiring {

/// What one rank does in a plan across hosts: messages and additions on a workspace, a run of bytes of its
/// own. Places in it are multiples of a cache line but for those of messages with several sums.
struct RankSchedule {
  /// The sum of a node of the canonical tree, for the elements that go with it.
  struct Sum {
    Subtree node;
    std::size_t offset = 0;  ///< of the first of these elements, in the workspace
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
    Range range;              ///< of elements
    std::vector<Sum> inputs;  ///< ascending, apart from each other
    std::vector<Sum> outputs;
  };
  /// Messages of a round go all at once, then what came is added.
  struct Round {
    std::vector<Message> sends;
    std::vector<Message> receives;
    std::vector<Join> joins;
  };

  /// The elements that each rank of the host adds for it, by its place; may be empty.
  std::vector<Range> host_shares;
  Range share;                 ///< this rank's
  std::vector<Sum> host_sums;  ///< what it adds of its host's contributions, for `share`
  std::vector<Round> rounds;   ///< of all steps between hosts; as many on every rank
  std::size_t result = 0;      ///< offset of the results for `share`
  std::size_t bytes = 0;       ///< of the workspace
};

/// The part of `rank` in `plan`. Its dimension within hosts may be of any algorithm; all others keep the
/// canonical order.
MULTIRING_API RankSchedule make_schedule(const Plan& plan, int rank);

}  // namespace multiring
