#pragma once

#include <cstddef>
#include <vector>

#include "base/export.h"
#include "topology/cost_model.h"
#include "topology/plan.h"

namespace multiring {

/// What messages from rank to rank do that carry what one rank has for another
/// (collective/cluster/cluster_copy.h): in a gather to the root, in a scatter from it, in an alltoall from
/// each to each. The root is rank 0.
class MULTIRING_API MessageLoad {
 public:
  MessageLoad(const Cluster& cluster, Collective collective);

  /// The most pieces that a rank sends to other hosts.
  std::size_t rank_pieces() const { return rank_sent_; }
  /// Predicted seconds, with the copies within hosts, at the speeds of `cluster`, which has the hosts and
  /// ranks of the one counted. `piece`: bytes of the longest; `staging_bytes`: what a rank publishes in a
  /// round of all ranks at most.
  double seconds(std::size_t piece, std::size_t staging_bytes, const Cluster& cluster,
                 const CostModel& model) const;

 private:
  /// Of one host.
  struct HostPieces {
    std::size_t sent = 0;  ///< to other hosts
    std::size_t received = 0;
    std::size_t within = 0;  ///< from one of its ranks to another
  };

  void add(const HostPieces& host, std::size_t rank_sent, std::size_t rank_received, std::size_t rank_within);

  bool is_alltoall_;
  std::vector<HostPieces> hosts_;
  // The most of any rank.
  std::size_t rank_sent_ = 0;
  std::size_t rank_messages_ = 0;  // sent or received, whichever is more
  std::size_t rank_crossing_ = 0;  // sent and received
  std::size_t rank_within_ = 0;    // given to, and taken from, ranks of its host
};

}  // namespace multiring
