#pragma once

#include <cstddef>
#include <span>

#include "collective/exchange.h"

namespace multiring {

/// Moves bytes between ranks through staging memory, in as many rounds as the longest piece needs.
///
/// A rank's staging memory is divided into *lanes*: one that all ranks read (broadcast, allgather, gather),
/// or one for each reader (scatter, alltoall). In round k every rank copies segment k of each outgoing piece
/// into that piece's lane, all synchronise, and every rank copies from the others' lanes.
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

  /// `outgoing`: one piece, or one for each rank; the number is the same on all ranks.
  StagedCopy(Exchange& exchange, const OperationCall& call, std::span<const Outgoing> outgoing);

  /// Copies the first segments into the round that the caller has begun, before it synchronises.
  void fill_first() { fill(0); }
  /// After the first synchronisation: the rest. `incoming`: for each rank, where its piece for this rank goes
  /// (null: not wanted); `longest`: bytes of the longest piece of any rank, the same on all.
  void run(std::span<const Incoming> incoming, std::size_t longest);

 private:
  void fill(std::size_t segment);
  void drain(std::size_t segment, std::span<const Incoming> incoming);

  Exchange& exchange_;
  const OperationCall& call_;
  std::span<const Outgoing> outgoing_;
  std::size_t lane_bytes_;
};

}  // namespace multiring
