#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/export.h"
#include "collective/plan/crossing_algorithm.h"
#include "collective/plan/job_costs.h"
#include "topology/plan.h"

namespace multiring {

/// What is known of a job before it starts, line by line; from `#` on a line is a comment:
///
///     costs latency=3e-05 bytes_per_second=1.1e+09 ...
///     0-16K rounds
///     1M- 4px2d/256K
///     allgather 64K- 4px2r
///
/// The costs are those that `multiring tune` has measured; what is missing keeps its default. Other lines are
/// rules for users who know better than the cost model: allreduces, or the collectives that are named, of at
/// least and at most so many bytes on a rank use this algorithm (parse_algorithm). The first rule that
/// matches wins.
class MULTIRING_API Tuning {
 public:
  /// Nothing is known.
  Tuning() = default;
  /// Raises a usage error with the number of the line that is wrong.
  static Tuning parse(std::string_view text);

  struct Rule {
    std::size_t min_bytes = 0;
    std::size_t max_bytes = 0;
    CrossingAlgorithm algorithm;
    std::size_t line = 0;
    Collective collective = Collective::kAllreduce;
  };
  const std::vector<Rule>& rules() const { return rules_; }
  /// For a collective of so many bytes; null: none matches.
  const CrossingAlgorithm* rule(Collective collective, std::size_t bytes) const;
  /// None: not measured.
  const std::optional<JobCosts>& costs() const { return costs_; }
  /// The line of the costs alone, which hold for other groups of ranks as well; empty: none.
  std::string costs_text() const;

 private:
  std::vector<Rule> rules_;
  std::optional<JobCosts> costs_;
};

/// Of what decides how a collective runs, for ranks to compare.
MULTIRING_API std::uint16_t hash_of(const Tuning& tuning, Collective collective);

}  // namespace multiring
