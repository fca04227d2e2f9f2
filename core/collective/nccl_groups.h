#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
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
/// in one operation. All ranks make, and do without, the same ones: each decides from what all have
/// published.
class NcclGroups : Immovable {
 public:
  /// Where warnings go, from any thread.
  void warn_by(std::function<void(const std::string&)> warn) { warn_ = std::move(warn); }

  /// In the thread that issues an operation with arrays on devices: whether this rank offers to run it by
  /// NCCL where they lie, as its descriptor tells the others. If the last offer of this name and size came
  /// to nothing the arrays are copied to the host all the same, so that nothing waits if this one does too.
  /// Thread-safe.
  /// `job`: the order of additions where calls do not name one. `min_bytes`: of arrays that allreduces never
  /// fuse: what is fused depends on time, and so would the bits.
  void offer(Operation& operation, const Exchange& exchange, Order job, std::size_t min_bytes) const;

  /// When some ranks have offered, in the round in which they are matched: whether all are to `run` the
  /// operation, whose arrays are then those on the device. Else, on all ranks, they lie in host memory, to
  /// which those of this rank are copied now if they have not been before. If NCCL cannot serve the devices
  /// together, a warning of rank 0 says why, once for these devices.
  bool agree(Exchange& exchange, const OperationCall& call, Operation& operation);
  /// Runs what this rank asks NCCL for, and calls `meanwhile`.
  void run(
      Exchange& exchange, const OperationCall& call, Operation& operation, std::span<const nccl::Call> calls,
      const std::function<void()>& meanwhile = [] {});
  /// After an operation that has raised an error, in the same thread, once the peers have been told: aborts,
  /// which may take seconds.
  void end_failed();
  /// Gives NCCL's memory and threads back. No operation is under way, and none follows.
  void release() { made_.clear(); }

 private:
  static bool all_offer(const Exchange& exchange);
  void note_offer(const Operation& operation, bool is_taken);
  nccl::Communicator* find(Exchange& exchange, const OperationCall& call, const Operation& operation);
  void tell(const Exchange& exchange, const std::string& refusal) const;

  std::map<std::vector<int>, std::unique_ptr<nccl::Communicator>> made_;  // by rank; null: not usable
  nccl::Communicator* agreed_ = nullptr;                                  // for the operation in progress
  nccl::Communicator* running_ = nullptr;  // in an operation, or in one that has failed
  std::shared_ptr<std::byte> result_;      // which it writes to
  std::function<void(const std::string&)> warn_;
  mutable std::mutex mutex_;
  std::set<std::uint64_t> not_taken_;  // arrays, by key_of()
};

/// Whether a rank that asks for this has nothing on the host to begin with before the offers of all are
/// known.
bool waits_for_offers(const Descriptor& descriptor);
/// Whether there is such a rank in the current round.
bool any_offers_nccl(const Exchange& exchange);

}  // namespace multiring
