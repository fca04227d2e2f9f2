#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

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
/// The elements pass in segments, several at once: a segment whose messages have been posted rests while the
/// messages of others arrive. In turn t every rank
///
///   1. takes in the messages that segments t - kRest, t - 2 kRest, ... have waited for since they were
///      posted, adds, and posts those segments' next messages,
///   2. meets the others of its host: all have staged segment t, and their shares of the results of the
///      segment that has no more messages to wait for,
///   3. adds its share of segment t and posts its first messages; takes those results out.
///
/// All ranks do so in the same order, so messages between two of them match by order alone.
///
/// Where float32 crosses the wire as half precision, the workspace and the results that a host shares hold
/// half precision; what is staged does not.
class ClusterAllreduce {
 public:
  /// `operations`: one, or several of the same reduction; the same on all ranks, at least one element.
  ClusterAllreduce(Exchange& exchange, const Call& call, std::span<Operation* const> operations,
                   const PieceList& pieces, Hierarchy& hierarchy);
  ~ClusterAllreduce();
  ClusterAllreduce(const ClusterAllreduce&) = delete;
  ClusterAllreduce& operator=(const ClusterAllreduce&) = delete;

  void run();

 private:
  /// A segment on its way, and its place in the workspace.
  struct Flight {
    const RankSchedule* schedule = nullptr;
    std::byte* memory = nullptr;
    std::vector<Hierarchy::Ticket> tickets;
    std::vector<int> peers;  ///< of each ticket; receives come first
  };
  // Turns that messages have to arrive before they are waited for: while those of one segment are waited
  // for, those of the next are on the wire.
  static constexpr std::size_t kRest = 2;

  void divide(std::size_t wanted);
  void connect();
  Range segment(std::size_t index) const { return segment_range(bytes_, segment_bytes_, index); }
  Flight& flight(std::size_t index) { return flights_[index % flights_.size()]; }
  void advance(std::size_t turn);
  void meet(std::size_t turn);
  void stage(std::size_t index);
  void publish(std::size_t index);
  void start(std::size_t index);
  void take(std::size_t index);
  void contribute(std::size_t index, std::byte* to);
  void post(Flight& flight, std::size_t round);
  void await(Flight& flight);
  void add(const Flight& flight, const RankSchedule::Join& join);
  void check(const WaitResult& result, const Flight* flight) const;

  Exchange& exchange_;
  const Call& call_;
  const PieceList& pieces_;
  Hierarchy& hierarchy_;
  const std::span<const int> mates_;  // ranks of this host
  int place_ = 0;                     // this rank's among them
  PartialSums sums_;
  std::optional<RoundedSums> rounded_;  // takes their place where the wire is narrower
  const DType carried_;                 // as which elements are carried in the workspace
  const std::size_t element_;           // bytes of one in the arrays
  const std::size_t carried_element_;
  const std::size_t bytes_;
  Waiting waiting_;
  std::size_t segment_bytes_ = 0;
  std::size_t segments_ = 0;
  std::size_t rounds_ = 0;
  std::shared_ptr<const RankSchedule> full_;  // of all segments but the last
  std::shared_ptr<const RankSchedule> last_;
  std::shared_ptr<std::vector<std::byte>> workspace_;
  std::vector<Flight> flights_;
  // Each goes through the pieces once.
  std::size_t staged_ = 0;
  std::size_t taken_ = 0;
  std::vector<PartialSums::Part> parts_;
  std::vector<const std::byte*> inputs_;
  std::vector<std::span<const std::byte>> spans_;
};

}  // namespace multiring
