#pragma once

#include <cstddef>
#include <span>

#include "collective/agreement/round_exchange.h"
#include "collective/staged/sections.h"
#include "topology/chunks.h"

namespace multiring {

/// Moves bytes between ranks through staging memory, in as many rounds as the longest piece needs.
///
/// A rank's staging memory is divided into sections: one that all ranks read (broadcast, allgather, gather),
/// or one for each reader (scatter, alltoall, reduce-scatter). In round k every rank copies segment k of each
/// outgoing piece into that piece's section, all synchronise, and every rank copies from the others'
/// sections.
class StagedCopy {
 public:
  struct Outgoing {
    const std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  struct Incoming {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };

  /// `outgoing`: one piece, or one for each rank; the number is the same on all ranks. `longest`: bytes of
  /// the longest piece of any rank, the same on all; what is not known yet has to be told before the others
  /// read.
  StagedCopy(RoundExchange& exchange, const OperationCall& call, std::span<const Outgoing> outgoing,
             std::size_t longest);
  void set_longest(std::size_t longest);

  /// Stages the first segments, in the round that the caller has begun and will synchronise.
  void stage_first() { stage(0); }
  /// After the first synchronisation: the rest. `incoming`: for each rank, where its piece for this rank goes
  /// (null: not wanted).
  void run(std::span<const Incoming> incoming);
  /// The same with `body(segment)` for each segment that all ranks have staged.
  template <class Body>
  void for_each_segment(const Body& body) {
    const std::size_t segments = sections_.segments();
    for (std::size_t segment = 0; segment < segments; ++segment) {
      body(segment);
      if (segment + 1 == segments) break;
      exchange_.next(call_, [&] { stage(segment + 1); });
    }
  }
  /// A segment of a piece of `bytes` bytes.
  Range range_of(std::size_t bytes, std::size_t segment) const {
    return segment_range(bytes, sections_.most(), segment);
  }
  /// The segment, staged by now, of what `source` has for this rank.
  const std::byte* staged_by(int source, std::size_t segment) const;

 private:
  void stage(std::size_t segment);

  RoundExchange& exchange_;
  const OperationCall& call_;
  std::span<const Outgoing> outgoing_;
  Sections sections_;
};

}  // namespace multiring
