#pragma once

#include <cstddef>
#include <map>
#include <tuple>
#include <vector>

#include "base/export.h"
#include "topology/plan.h"
#include "topology/transfers.h"

namespace multiring {

/// Bytes through one interface of a host, or through its cable to a neighbour.
struct LinkTraffic {
  int host = 0;
  int interface = 0;
  int neighbour = -1;  ///< another host; -1: all
  std::size_t sent = 0;
  std::size_t received = 0;
  std::size_t messages = 0;  ///< sent
};

/// What a rank moves.
struct RankTraffic {
  std::size_t sent = 0;            ///< bytes to ranks of other hosts
  std::size_t sent_in_memory = 0;  ///< bytes that ranks of its host take from it
  std::size_t messages = 0;        ///< to ranks of other hosts
  std::size_t touched = 0;         ///< bytes of memory that it reads and writes to send, add and copy
};

/// Counts the load of a plan's transfers on interfaces and ranks. The plan must outlive it.
class MULTIRING_API Traffic {
 public:
  explicit Traffic(const Plan& plan);

  /// Counts a transfer of `step`.
  void add(const Step& step, const Transfer& transfer);
  void clear();

  /// By host, then interface.
  const std::vector<LinkTraffic>& links() const { return links_; }
  /// Where hosts reach their neighbours only: by sender, neighbour and interface, each of which has a cable
  /// of its own in each direction. Empty: the hosts share a switch.
  const std::map<std::tuple<int, int, std::size_t>, LinkTraffic>& cables() const { return cables_; }
  /// By rank.
  const std::vector<RankTraffic>& ranks() const { return ranks_; }
  int host_of(int rank) const { return host_of_[static_cast<std::size_t>(rank)]; }
  /// The entry of links() that a channel uses on a host.
  std::size_t link_of(int host, int channel) const;

 private:
  void add_touched(const Transfer& transfer);

  const Plan& plan_;
  std::vector<int> host_of_;
  std::vector<std::size_t> first_link_;  // of each host
  std::vector<LinkTraffic> links_;
  std::map<std::tuple<int, int, std::size_t>, LinkTraffic> cables_;
  std::vector<RankTraffic> ranks_;
  std::vector<Range> adding_;  // by rank: what it added to last
};

/// What one step of a plan moves.
MULTIRING_API Traffic step_traffic(const Plan& plan, const Step& step);

/// What all steps of a plan move.
MULTIRING_API Traffic total_traffic(const Plan& plan);

}  // namespace multiring
