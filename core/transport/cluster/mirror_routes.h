#pragma once

#include <span>
#include <vector>

#include "base/export.h"

namespace multiring {

/// What ranks of a message publish goes from one rank to another one on another host.
struct MirrorMessage {
  int peer = 0;            ///< the other one
  std::vector<int> ranks;  ///< whose header, and then whose staging memory, in this order
};

/// Messages that go at once.
struct MirrorStep {
  std::vector<MirrorMessage> out;  ///< may be sent when all that comes in earlier steps is there
  std::vector<MirrorMessage> in;
};

/// How what the ranks of a group publish in a round comes to all hosts, as one rank sees it.
///
/// For every rank elsewhere there is one here that *answers for it*: it receives what that one publishes, and
/// passes it on where it has to go further. Which one that is follows from the places of both on their hosts,
/// so all ranks of a host take part. Two ranks send each other at most one message in a round, in each
/// direction.
struct MirrorRoutes {
  /// Up to so many hosts every rank sends to all others. More disseminate: with hosts in a circle and a radix
  /// r, each has in step s what the r^s hosts up to itself have published, and sends that to the hosts that
  /// are 1, 2, ..., r - 1 times r^s further, so every host gets everything once. (Hensgen, Finkel and Manber,
  /// "Two algorithms for barrier synchronization", 1988; for blocks and several ports: Bruck et al.,
  /// "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997.)
  static constexpr int kDirectHosts = 8;
  /// The radix is the smallest that takes as many steps as this one.
  static constexpr int kMostRadix = 4;

  std::vector<int> answering;     ///< for each rank the one here that answers for it; those here themselves
  std::vector<MirrorStep> steps;  ///< as many on all ranks
};

/// Of `rank`, where `hosts` has the number of each rank's host. `direct` is at least 2.
MULTIRING_API MirrorRoutes mirror_routes(std::span<const int> hosts, int rank,
                                         int direct = MirrorRoutes::kDirectHosts);

}  // namespace multiring
