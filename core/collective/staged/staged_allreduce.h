#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "base/immovable.h"
#include "collective/agreement/round_exchange.h"
#include "collective/operation.h"
#include "collective/sums/piece_list.h"
#include "collective/sums/rounded_sums.h"
#include "topology/chunks.h"

namespace multiring {

/// Allreduce of memory that the peers cannot see, through staging memory that they can: the algorithms
/// "staged" and "rounds" (collective/allreduce.cpp, which defines the words). In round k every rank
///
///   1. takes the sums of segment k - 2 out of its own staging memory,
///   2. stages segment k there, except the slice that it adds,
///   3. adds its slice of segment k - 1, reading the peers' parts in their staging memory and writing the sum
///      back to each,
///
/// and all synchronise. Every cache line of staging memory is read and then written by two ranks in turn:
/// writing a line that another core has only read costs several times as much as writing one that it owns
/// (docs/performance.md).
///
/// In "rounds" every rank adds everything, and rounds what a plan would have rounded.
class StagedAllreduce : Immovable {
 public:
  /// `operations`: one, or several of the same reduction. `whole`: in rounds, in which every rank adds
  /// everything, as ranks have to that do not share memory.
  StagedAllreduce(RoundExchange& exchange, const OperationCall& call, std::span<Operation* const> operations,
                  bool whole);

  /// Stages the first segment in the round that the caller has begun and will synchronise.
  void stage_first();
  /// After that synchronisation: the rest.
  void run();

 private:
  Range segment(std::size_t index) const { return segment_range(bytes_, segment_bytes_, index); }
  /// Slice of a segment that a rank owns, relative to the segment's begin.
  Range slice_of(Range segment, int rank) const;
  /// Calls body(part) for the parts of a segment that pass through this rank's staging memory.
  template <class Body>
  void for_each_staged(Range segment, const Body& body) const;
  void take(std::byte* staging, Range segment, Range part);
  void stage(std::byte* staging, Range segment, Range part);
  void stage_whole(Range segment);
  void take_and_stage(std::size_t index);
  void reduce_slice(std::size_t index);
  void reduce_whole(Range segment);
  void run_whole();
  void reduce_bytes(std::span<const void* const> inputs, std::span<void* const> outputs, std::size_t bytes);

  RoundExchange& exchange_;
  const OperationCall& call_;
  const Operation& first_;
  const PieceList pieces_;
  // Each goes through the pieces once, from the first to the last.
  std::size_t stage_cursor_ = 0;
  std::size_t take_cursor_ = 0;
  std::size_t reduce_cursor_ = 0;
  const std::size_t bytes_;
  const std::size_t segment_bytes_;
  const bool whole_;
  std::optional<RoundedSums> rounded_;
  std::vector<Subtree> nodes_;  // of the hosts, where sums are rounded between them
};

}  // namespace multiring
