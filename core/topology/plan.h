#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/arithmetic/dtype.h"
#include "base/arithmetic/order.h"
#include "base/export.h"
#include "topology/blocks.h"
#include "topology/chunks.h"
#include "topology/cluster.h"
#include "topology/dimensions.h"

namespace multiring {

// An allreduce is composed: in each dimension, from the inside out, the ranks of every group divide what they
// have and reduce it (reduce-scatter), so that in the next dimension as many groups work at once as there are
// shares; then the sums return in reverse order (all-gather). Where latency costs more than bytes, a
// dimension reduces to the first rank of the group instead (reduce) and returns the result by a broadcast.
//
// A reduce-scatter is the first half of that, an allgather the second: there each rank has its own block, and
// all blocks cross in one dimension. A broadcast is an allgather in which the root alone has a block. The
// others have no plan: what a rank receives is for no other.

enum class Collective {
  kAllreduce,
  kReduceScatter,
  kAllgather,
  kBroadcast,
  kGather,
  kScatter,
  kAlltoall,
};

inline constexpr Collective kAllCollectives[] = {
    Collective::kAllreduce, Collective::kReduceScatter, Collective::kAllgather, Collective::kBroadcast,
    Collective::kGather,    Collective::kScatter,       Collective::kAlltoall};

/// Whether it adds anything, so that there is an order of additions.
constexpr bool adds(Collective collective) {
  return collective == Collective::kAllreduce || collective == Collective::kReduceScatter;
}

/// Whether there are plans of it.
constexpr bool has_plans(Collective collective) {
  switch (collective) {
    case Collective::kAllreduce:
    case Collective::kReduceScatter:
    case Collective::kAllgather:
    case Collective::kBroadcast:
      return true;
    case Collective::kGather:
    case Collective::kScatter:
    case Collective::kAlltoall:
      break;
  }
  return false;
}

/// "allreduce", "reduce_scatter", ...: as the function is called.
MULTIRING_API const char* collective_name(Collective collective);
/// None: there is no such name.
MULTIRING_API std::optional<Collective> find_collective(std::string_view name);
/// Raises a usage error where there is no such name.
MULTIRING_API Collective parse_collective(std::string_view name);

/// "reduce-scatter", "reduce", "allreduce", "broadcast", "all-gather".
MULTIRING_API const char* phase_name(Phase phase);

/// Whose contributions a rank has summed when it enters a step.
struct Holding {
  std::vector<int> ranks;             ///< ascending
  std::size_t parts = 1;              ///< sums that have to be sent for them: 1 where order does not matter
  std::size_t bytes_per_element = 0;  ///< of all parts together, on the wire
};

/// Ranks that reduce or share `range` with each other.
struct Group {
  std::vector<int> ranks;         ///< by their position in the dimension
  Range range;                    ///< of elements
  int channel = -1;               ///< index into Plan::channels(); -1: the memory of a host
  std::size_t first_holding = 0;  ///< member i enters a reducing step with Step::holdings[first_holding + i]
  bool backward = false;          ///< from each position to the one before, of both directions
  int owner = -1;                 ///< the position that all of `range` belongs to; -1: each has a share
};

/// Segments of a collective that are in a hop at a time: while a rank waits for the messages of one, those of
/// the next are posted.
inline constexpr std::size_t kPipelineDepth = 2;

/// What all groups of a dimension do at the same time.
struct MULTIRING_API Step {
  Phase phase = Phase::kReduceScatter;
  int dimension = 0;  ///< index into Plan::mode(); 0 is the memory of a host
  Algorithm algorithm = Algorithm::kPairwise;
  std::vector<Group> groups;
  std::vector<Holding> holdings;  ///< empty for all-gather and broadcast

  bool across_hosts() const { return dimension > 0; }
  /// The most sums that a member has to send for what it holds; 1 for steps that do not reduce.
  std::size_t most_parts() const;
};

struct PlanOptions {
  std::size_t count = 0;  ///< elements
  DType dtype = DType::kFloat32;
  /// Empty: flat_mode(), by a chain or ring where hosts reach their neighbours only. Dimensions without an
  /// algorithm take the pairwise exchange.
  Mode mode;
  int channels = 1 << 10;   ///< at most so many interfaces are used at once
  std::size_t segment = 0;  ///< bytes of the array that pass at once, whatever the steps; 0: chosen by costs
  Order order = Order::kCanonical;  ///< kAny: each holder sends one sum of all it has
  /// Whether partial sums are sent as elements of `dtype`, rounded once more by each step that sends them.
  bool rounded = false;
  Collective collective = Collective::kAllreduce;
  /// Elements of each rank's block, where the collective is no allreduce and `count` does not matter.
  std::vector<std::size_t> blocks = {};
};

/// What `count` elements on each of `ranks` mean to a collective: an array, divided as reduce_scatter does;
/// of a scatter that of the root, rank 0, and of an alltoall that of each, divided likewise; of an allgather
/// or a gather the block of each, of a broadcast that of the root.
MULTIRING_API PlanOptions collective_options(Collective collective, std::size_t count, int ranks);

/// Raises a usage error unless a collective other than an allreduce may have the mode, whatever the ranks:
/// its blocks cross hosts at once, and the rank that carries one holds all of it.
MULTIRING_API void require_blocks(const Mode& mode);

/// Steps of one collective; immutable.
class MULTIRING_API Plan {
 public:
  /// Raises a usage error if the cluster is not valid, the collective has no plans, the mode does not fit
  /// them, or a ring of more than two ranks is asked for while the order of additions has to be canonical.
  Plan(Cluster cluster, const PlanOptions& options);

  const Cluster& cluster() const { return cluster_; }
  /// Every dimension with its algorithm.
  const Mode& mode() const { return mode_; }
  std::size_t count() const { return options_.count; }
  DType dtype() const { return options_.dtype; }
  Order order() const { return options_.order; }
  Collective collective() const { return options_.collective; }
  /// None: an allreduce.
  const std::optional<Blocks>& blocks() const { return blocks_; }
  bool canonical() const { return options_.order != Order::kAny; }
  const std::vector<Channel>& channels() const { return channels_; }
  std::span<const Step> steps() const { return steps_; }

  /// Bytes of an element, and of a partial sum of it: float16 and bfloat16 are summed in float32 and rounded
  /// once, at the end (base/arithmetic/reduction.h), so partial sums travel as float32; unless they are to be
  /// rounded.
  std::size_t element_bytes() const { return dtype_size(options_.dtype); }
  std::size_t partial_bytes() const;
  /// Boundaries between chunks are multiples of so many elements: a cache line.
  std::size_t granule() const;
  /// Bytes on the wire for one element of the contributions of `ranks` (ascending), and of how many sums.
  Holding holding(std::vector<int> ranks) const;
  /// What the ranks of a host have to send and receive for it: a range of elements each, which may be empty.
  std::vector<Range> host_shares(const Host& host) const;
  /// The part of `group.range` that member `position` owns after a reduce-scatter.
  Range share(const Group& group, std::size_t position) const;
  /// The most sums that any rank has to send to another host for what its host holds: 1 if every host's ranks
  /// are a node of the canonical tree.
  std::size_t parts_across_hosts() const;

 private:
  friend class PlanBuilder;

  Cluster cluster_;
  PlanOptions options_;
  std::optional<Blocks> blocks_;
  Mode mode_;
  std::vector<Channel> channels_;
  std::vector<Step> steps_;
};

}  // namespace multiring
