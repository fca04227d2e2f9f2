#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/immovable.h"
#include "collective/exchange.h"
#include "collective/operation.h"
#include "collective/plan/plan_cache.h"
#include "collective/sums/partial_sums.h"
#include "collective/sums/piece_list.h"
#include "collective/sums/rounded_sums.h"
#include "topology/chunks.h"
#include "transport/hierarchy.h"

namespace multiring {

/// Allreduce by a plan: within hosts over their memory, between them by messages.
///
/// The elements pass in segments, several in flight at once. In iteration t every rank
///
///   1. waits for the messages that segments t - d, t - 2d, ... posted d iterations ago (d: kPipelineDepth),
///      adds what came, and posts these segments' next messages,
///   2. synchronises with its host: all have staged segment t, and their shares of the results of the segment
///      that has no more messages to wait for,
///   3. adds its share of segment t and posts its first messages; copies those results out.
///
/// All ranks keep this order, so messages between two of them match by order alone.
///
/// With a half-precision comm_dtype the workspace and the results that a host shares are of that type; staged
/// contributions stay float32.
class ClusterAllreduce : Immovable {
 public:
  /// `operations`: one, or several of the same reduction; the same on all ranks, at least one element.
  ClusterAllreduce(Exchange& exchange, const OperationCall& call, std::span<Operation* const> operations,
                   const PieceList& pieces, Hierarchy& hierarchy);
  ~ClusterAllreduce();

  void run();

 private:
  /// A segment in flight, and its part of the workspace.
  struct InFlightSegment {
    const RankSchedule* schedule = nullptr;
    std::byte* memory = nullptr;
    std::vector<Hierarchy::Ticket> tickets;
    std::vector<int> peers;  ///< of each ticket; receives come first
  };
  // Iterations between posting messages and waiting for them: meanwhile those of the next segment are posted.
  static constexpr std::size_t kPipelineDepth = 2;

  void connect();
  Range segment(std::size_t index) const { return segment_range(bytes_, segment_bytes_, index); }
  InFlightSegment& in_flight(std::size_t index) { return in_flight_[index % in_flight_.size()]; }
  void advance(std::size_t iteration);
  void exchange_within_host(std::size_t iteration);
  void stage(std::size_t index);
  void publish(std::size_t index);
  void start(std::size_t index);
  void write_results(std::size_t index);
  void contribute(std::size_t index, std::byte* to);
  void post(InFlightSegment& current, std::size_t step);
  void await(InFlightSegment& current);
  void add(const InFlightSegment& current, const RankSchedule::Join& join);
  /// Whether what has to be added for a sum of `node` includes the sum of `part`.
  bool is_part(Subtree part, Subtree node) const {
    return order_ == Order::kAny || (node.begin <= part.begin && part.end <= node.end);
  }
  void check(const WaitResult& result, const InFlightSegment* current) const;

  Exchange& exchange_;
  const OperationCall& call_;
  const PieceList& pieces_;
  Hierarchy& hierarchy_;
  const std::span<const int> local_ranks_;  // ranks of this host
  int local_rank_ = 0;                      // this rank's index among them
  const Order order_;
  PartialSums sums_;
  std::optional<RoundedSums> rounded_;  // used instead of sums_ with a half-precision comm_dtype
  const DType carried_;                 // dtype of elements in the workspace
  const std::size_t element_;           // bytes of one in the arrays
  const std::size_t carried_element_;
  const std::size_t bytes_;
  WaitOptions waiting_;
  std::size_t segment_bytes_ = 0;
  std::size_t segments_ = 0;
  std::size_t steps_ = 0;
  std::shared_ptr<const RankSchedule> full_;  // of all segments but the last
  std::shared_ptr<const RankSchedule> last_;
  std::shared_ptr<std::vector<std::byte>> workspace_;
  std::vector<InFlightSegment> in_flight_;
  // Positions in the pieces.
  std::size_t read_cursor_ = 0;
  std::size_t write_cursor_ = 0;
  std::vector<PartialSums::Part> parts_;
  std::vector<const std::byte*> inputs_;
  std::vector<std::span<const std::byte>> spans_;
};

}  // namespace multiring
