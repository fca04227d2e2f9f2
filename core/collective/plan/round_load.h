#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "base/export.h"
#include "topology/cost_model.h"

namespace multiring {

/// What a round does in which all ranks publish as many bytes, or one rank does: host by host, step by step.
class MULTIRING_API RoundLoad {
 public:
  /// `publisher`: -1: all ranks.
  explicit RoundLoad(const Cluster& cluster, int publisher = -1);

  std::size_t steps() const { return steps_.size(); }
  /// Of what each rank publishes: how much waits for one host at most.
  double queued_parts() const { return queued_parts_.empty() ? 0.0 : std::ranges::max(queued_parts_); }
  /// The most ranks whose data one rank sends, counted once for each message.
  std::size_t rank_parts() const { return rank_parts_; }
  /// `taken`: bytes that a rank takes of what one has published; `rounds`: of which this is one. Predicted
  /// seconds, at the speeds of `cluster`, which has the hosts and ranks of the one counted.
  double seconds(std::size_t bytes, std::size_t taken, std::size_t rounds, const Cluster& cluster,
                 const CostModel& model) const;

 private:
  /// By a host in one step, or by a host to one neighbour.
  struct Sent {
    std::size_t parts = 0;  ///< of ranks
    std::size_t messages = 0;
    std::size_t most_messages = 0;  ///< of one rank
    std::size_t most_parts = 0;     ///< of one message

    std::size_t messages_each(std::size_t bytes) const;
    double seconds(std::size_t bytes, double beyond_burst, double bytes_per_second,
                   const CostModel& model) const;
  };
  using Link = std::pair<std::size_t, int>;  // a host, and the neighbour; or -1: all others, by a switch

  std::vector<std::map<Link, Sent>> steps_;
  std::vector<double> queued_parts_;  // of ranks, by step: what waits for one host
  std::size_t rank_parts_ = 0;
  std::size_t link_parts_ = 0;  // that one link passes in all steps
  std::size_t publishers_ = 0;
};

}  // namespace multiring
