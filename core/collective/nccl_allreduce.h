#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
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
  /// Where warnings go, from any thread.
  void warn_by(std::function<void(const std::string&)> warn) { warn_ = std::move(warn); }

  /// In the thread that issues an operation with arrays on devices: whether this rank offers to reduce them
  /// by NCCL where they lie, as its descriptor tells the others. If the last offer of this name and size came
  /// to nothing the arrays are copied to the host all the same, so that nothing waits if this one does too.
  /// Thread-safe.
  /// `min_bytes`: of arrays that are never fused, for what is fused depends on time, and so would the bits.
  void offer(Operation& operation, const Exchange& exchange, std::size_t min_bytes) const;

  /// When all ranks have offered, in the round in which they are matched: reduces by NCCL, and calls
  /// `meanwhile`. False, on all ranks, if NCCL cannot serve these devices together.
  /// Then a warning of rank 0 says why, once for these devices.
  bool allreduce(Exchange& exchange, const OperationCall& call, Operation& operation,
                 const std::function<void()>& meanwhile);
  /// Whether NCCL has taken what this rank had offered.
  void note_offer(const Operation& operation, bool is_taken);
  /// After an allreduce that has raised an error, in the same thread, once the peers have been told: aborts,
  /// which may take seconds.
  void end_failed();
  /// Gives NCCL's memory and threads back. No operation is under way, and none follows.
  void release() { made_.clear(); }

 private:
  nccl::Communicator* find(Exchange& exchange, const OperationCall& call, const Operation& operation);
  void tell(const Exchange& exchange, const std::string& refusal) const;

  std::map<std::vector<int>, std::unique_ptr<nccl::Communicator>> made_;  // by rank; null: not usable
  nccl::Communicator* running_ = nullptr;  // in an allreduce, or in one that has failed
  std::function<void(const std::string&)> warn_;
  mutable std::mutex mutex_;
  std::set<std::uint64_t> not_taken_;  // arrays, by key_of()
};

/// Whether some ranks have offered to reduce on their devices in the current round; all have, the same parts
/// of their arrays.
bool any_offers_nccl(const Exchange& exchange);
bool all_offer_nccl(const Exchange& exchange);

}  // namespace multiring
