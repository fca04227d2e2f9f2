#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/immovable.h"
#include "collective/operation.h"
#include "device/nccl.h"

namespace multiring {

class Exchange;
struct OperationCall;

/// NCCL's communicators of a group of ranks, one for each choice of devices that all its arrays have lain on
/// in one allreduce. All ranks make, and do without, the same ones: each decides from what all have
/// published.
class NcclGroups : Immovable {
 public:
  /// The device on which this rank offers to reduce an operation's arrays where they lie; -1: it does not,
  /// and they pass through host memory on all ranks. Thread-safe. `min_bytes`: of arrays that are never
  /// fused, for what is fused depends on time, and so would the bits.
  int device_of(const Operation& operation, const Exchange& exchange, std::size_t min_bytes) const;

  /// When all ranks have offered, in the round in which they are matched: reduces by NCCL. False, on all
  /// ranks, if NCCL cannot serve these devices together.
  bool allreduce(Exchange& exchange, const OperationCall& call, Operation& operation);
  /// After an allreduce that has raised an error, in the same thread, once the peers have been told: aborts,
  /// which may take seconds.
  void end_failed();

 private:
  nccl::Communicator* find(Exchange& exchange, const OperationCall& call, const Operation& operation);

  std::map<std::vector<int>, std::unique_ptr<nccl::Communicator>> made_;  // by rank; null: not usable
  nccl::Communicator* running_ = nullptr;  // in an allreduce, or in one that has failed
  std::atomic<std::uint64_t> refused_{0};  // devices of this rank, a bit each
};

/// Whether some ranks, or all, have offered to reduce on their devices in the current round.
bool any_offers_nccl(const Exchange& exchange);
bool all_offer_nccl(const Exchange& exchange);

}  // namespace multiring
