#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/export.h"

namespace multiring {

/// A message that carries what `ranks` have published from one host to another.
struct MirrorMessage {
  int peer = 0;            ///< the rank at the other end
  std::vector<int> ranks;  ///< of headers, and then of staging memory, in this order
};

/// Messages that are sent concurrently.
struct MirrorStep {
  std::vector<MirrorMessage> out;  ///< sent when all of earlier steps has arrived
  std::vector<MirrorMessage> in;
};

/// How what the ranks of a group publish in a round reaches all hosts, as one rank sees it.
///
/// Every remote rank has one *receiver* on each host, which receives what it publishes and forwards it to
/// further hosts. Receivers follow from local indices, so that all ranks of a host take part. Messages of a
/// round between two ranks go in the order of the steps.
struct MirrorRoutes {
  /// Up to so many hosts every rank sends to all others. More hosts use dissemination: in a circle of hosts
  /// and with radix r, a host has in step s what the r^s hosts up to itself have published, and sends that to
  /// the hosts at distances 1, 2, ..., r - 1 times r^s. So every host gets all data once. (Hensgen, Finkel
  /// and Manber, "Two algorithms for barrier synchronization", 1988; for blocks and several ports: Bruck et
  /// al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997.)
  static constexpr int kDirectHosts = 8;
  /// The radix is the smallest one with as few steps as this one.
  static constexpr int kMaxRadix = 4;
  /// Up to so many bytes of staging memory of a message's ranks go together; more take a message for each.
  static constexpr std::size_t kMaxCombined = 16 * 1024;

  std::vector<int> receivers;     ///< on this host, of each rank; of its own ranks themselves
  std::vector<MirrorStep> steps;  ///< the same number on all ranks
};

/// The routes of `rank`. `hosts`: number of each rank's host. `direct`: at least 2.
MULTIRING_API MirrorRoutes mirror_routes(std::span<const int> hosts, int rank,
                                         int direct = MirrorRoutes::kDirectHosts);

/// The routes where hosts reach their neighbours only: what comes from one is passed on to the other.
/// `closed`: the last host and the first are neighbours, too.
MULTIRING_API MirrorRoutes neighbour_routes(std::span<const int> hosts, int rank, bool closed);

}  // namespace multiring
