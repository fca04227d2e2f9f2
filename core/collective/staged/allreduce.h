#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "collective/exchange.h"
#include "collective/operation.h"
#include "collective/sums/piece_list.h"
#include "collective/sums/rounded_sums.h"
#include "topology/chunks.h"

namespace multiring {

/// Allreduce of memory that the peers cannot see, through staging memory that they can.
///
/// A segment is as many bytes as staging memory holds. Rank i *owns* slice i of each segment: it adds that
/// slice of all ranks and hands the sum back. In round k of an operation every rank
///
///   1. takes the sums of segment k - 2 out of its own staging memory,
///   2. stages segment k in the same place, but for the slice that it owns,
///   3. adds its slice of segment k - 1, of which the peers' parts lie in their staging memory, and writes
///      the sum back to where each part came from,
///
/// and all synchronise: one synchronisation a segment, and one more. Every cache line of staging memory
/// passes to and fro between two ranks, each of which reads and then writes it. That matters more than the
/// number of bytes: to write a line that another core has read, but not written since, costs several times as
/// much as to write one that the other core owns alone (docs/performance.md has figures).
///
/// Small operations take one synchronisation instead: everybody stages everything and adds everything. So do
/// ranks that do not share memory, segment by segment; they round what a plan would have rounded on its way.
///
/// What is added up may lie in many pieces, one after the other: those of one array, or several arrays.
class StagedAllreduce {
 public:
  /// `operations`: one, or several of the same reduction.
  StagedAllreduce(Exchange& exchange, const Call& call, std::span<Operation* const> operations);
  StagedAllreduce(const StagedAllreduce&) = delete;
  StagedAllreduce& operator=(const StagedAllreduce&) = delete;

  /// Stages the first segment, in the round that the caller has begun and will synchronise.
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
  void take_and_stage(std::size_t index);
  void reduce_slice(std::size_t index);
  void reduce_whole(Range segment);
  void run_whole();
  void reduce_bytes(std::span<const void* const> inputs, std::span<void* const> outputs, std::size_t bytes);

  Exchange& exchange_;
  const Call& call_;
  const Operation& first_;
  const PieceList pieces_;
  // Each goes through the pieces once, from the first to the last.
  std::size_t staged_ = 0;
  std::size_t taken_ = 0;
  std::size_t reduced_ = 0;
  const std::size_t bytes_;
  const std::size_t segment_bytes_;
  bool whole_;
  std::optional<RoundedSums> rounded_;
  std::vector<Subtree> nodes_;  // of the hosts, where sums are rounded between them
};

}  // namespace multiring
