#pragma once

#include <cstddef>
#include <vector>

#include "topology/plan.h"

namespace multiring {

/// Builds the steps of a plan whose cluster, mode and channels are known.
class PlanBuilder {
 public:
  explicit PlanBuilder(const Plan& plan) : plan_(plan) {}

  std::vector<Step> build();

 private:
  /// A range of elements with the rank that owns its partial sum in each part of the cluster: first in each
  /// host, and after each further dimension in each block of hosts reduced by then.
  struct Cell {
    Range range;
    int channel = -1;
    std::vector<int> owners;
    bool backward = false;  ///< its direction, if the next step has both
    int owner = -1;         ///< index into `owners` of the rank whose block it is; -1: of no rank
  };

  void reduce_within_hosts();
  void reduce_to_carriers();
  std::vector<Cell> shared_cells() const;
  void divide_into_stripes();
  void reduce_across(int dimension);
  void divide_into_directions();
  void add_groups(Step& step, const Cell& cell, std::size_t group_size) const;
  std::vector<Cell> divide(const Cell& cell, std::size_t group_size) const;
  std::vector<Holding> block_holdings(std::size_t hosts_in_block) const;
  void add_return_steps();

  const Plan& plan_;
  std::vector<Step> steps_;
  std::vector<Cell> cells_;
  std::size_t hosts_in_block_ = 1;  // that the owners of a cell hold the sums of
};

}  // namespace multiring
