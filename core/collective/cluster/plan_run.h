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

/// Runs a plan: within hosts over their memory, between them by messages.
///
/// The elements pass in segments, several in flight at once. In iteration t every rank
///
///   1. waits for the messages that segments t - d, t - 2d, ... posted d iterations ago (d: kPipelineDepth),
///      adds what came, and posts these segments' next messages,
///   2. synchronises with its host: all have staged segment t, and their shares of the results of the segment
///      that has no more messages to wait for,
///   3. adds its share of segment t and posts its first messages; copies those results out.
///
/// All ranks keep this order, so messages between two of them match by order alone. A reduce-scatter shares
/// no results within hosts, and an allgather or a broadcast stages and adds nothing.
///
/// Where a segment of an allreduce is one range of an array, that range takes the place of the workspace: the
/// results are received and added where they belong, and a rank that is alone on its host sends its
/// contribution from where it is. Input and output may be the same: the result of an element comes, by plan,
/// when its contribution has been sent and added.
///
/// With a half-precision comm_dtype the workspace and the results that a host shares are of that type; staged
/// contributions stay float32.
class PlanRun : Immovable {
 public:
  /// Bytes of the pieces that pass through the plan at once.
  struct Segment {
    Range range;
    std::shared_ptr<const RankSchedule> schedule;
  };

  /// Among whom.
  struct Members {
    std::span<const int> local;  ///< those of this host, ascending
    int size;                    ///< of all hosts
  };

  /// `operation`: that, or of several of the same reduction the first. `segments`: one after the other, all
  /// of `pieces`; the same on all ranks, at least one.
  PlanRun(Exchange& exchange, const OperationCall& call, const Operation& operation, const PieceList& pieces,
          Collective collective, std::vector<Segment> segments, Members members);
  ~PlanRun();

  /// The dtype of elements on their way.
  static DType carried_dtype(const Operation& operation);

  void run();

 private:
  /// A segment in flight, and its part of the workspace.
  struct InFlightSegment {
    const RankSchedule* schedule = nullptr;
    std::byte* memory = nullptr;
    const std::byte* input = nullptr;  ///< in the place of host_sums; null: they are in `memory`
    std::byte* output = nullptr;       ///< in the place of the results; null: they are in `memory`
    std::vector<Hierarchy::Ticket> tickets;
    std::vector<int> peers;  ///< of each ticket; receives come first
  };

  void connect();
  InFlightSegment& in_flight(std::size_t index) { return in_flight_[index % in_flight_.size()]; }
  void advance(std::size_t iteration);
  void exchange_within_host(std::size_t iteration);
  void stage(std::size_t index);
  void publish(std::size_t index);
  void start(std::size_t index);
  void write_results(std::size_t index);
  void use_arrays(std::size_t index);
  /// What a schedule has at an offset, to be written or read.
  std::byte* at(const InFlightSegment& current, std::size_t offset) const;
  const std::byte* source_at(const InFlightSegment& current, std::size_t offset) const;
  /// Where the results of an element of this rank's share are.
  std::byte* result_at(const InFlightSegment& current, std::size_t element) const {
    const RankSchedule& schedule = *current.schedule;
    return at(current, schedule.result + (element - schedule.share.begin) * carried_element_);
  }
  /// Where elements of a segment are among the bytes of the pieces.
  Range bytes_of(std::size_t index, Range elements) const {
    const std::size_t begin = segments_[index].range.begin;
    return {begin + elements.begin * element_, begin + elements.end * element_};
  }
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
  const std::span<const int> local_ranks_;  // members on this host
  int local_rank_ = 0;                      // this rank's index among them
  const Collective collective_;
  const Order order_;
  PartialSums sums_;
  std::optional<RoundedSums> rounded_;  // used instead of sums_ with a half-precision comm_dtype
  const DType carried_;                 // dtype of elements in the workspace
  const std::size_t element_;           // bytes of one in the arrays
  const std::size_t carried_element_;
  const std::vector<Segment> segments_;
  WaitOptions waiting_;
  std::size_t published_at_ = 0;  // in staging memory, behind the largest segment that may be staged there
  std::size_t steps_ = 0;
  std::shared_ptr<std::vector<std::byte>> workspace_;
  std::vector<InFlightSegment> in_flight_;
  // Positions in the pieces.
  std::size_t array_cursor_ = 0;
  std::size_t read_cursor_ = 0;
  std::size_t write_cursor_ = 0;
  std::vector<PartialSums::Part> parts_;
  std::vector<const std::byte*> inputs_;
  std::vector<std::span<const std::byte>> spans_;
};

/// Allreduce of at least one element. `operations`: one, or several of the same reduction; the same on all
/// ranks.
void allreduce_by_plan(Exchange& exchange, const OperationCall& call, std::span<Operation* const> operations,
                       const PieceList& pieces, const CrossingAlgorithm& algorithm);

/// Allreduce in any order, in place, among the ranks of all hosts that have this one's local number; hosts
/// have as many ranks each. `operation`: of which dtype, comm_dtype and reduction, in which an average is one
/// of as many numbers as there are hosts. `mode`: of all ranks, or empty.
void allreduce_across_hosts(Exchange& exchange, const OperationCall& call, const Operation& operation,
                            std::byte* memory, std::size_t bytes, Mode mode);

/// Reduce-scatter, allgather or broadcast of at least one byte. `blocks`: of each rank, how long its block
/// is, and what this rank has and wants of it. `operation`: of which dtype and reduction.
void run_blocks(Exchange& exchange, const OperationCall& call, const Operation& operation,
                Collective collective, std::span<const Piece> blocks, const CrossingAlgorithm& algorithm);

}  // namespace multiring
