#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
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

  /// In an operation that all ranks offer to run by NCCL: whether they are to `run` it. If NCCL cannot serve
  /// the devices together, a warning of rank 0 says why, once for these devices.
  bool prepare(Exchange& exchange, const OperationCall& call, const Operation& operation);
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
  nccl::Communicator* find(Exchange& exchange, const OperationCall& call, const Operation& operation);
  void tell(const Exchange& exchange, const std::string& refusal) const;

  std::map<std::vector<int>, std::unique_ptr<nccl::Communicator>> made_;  // by rank; null: not usable
  nccl::Communicator* agreed_ = nullptr;                                  // for the operation in progress
  nccl::Communicator* running_ = nullptr;  // in an operation, or in one that has failed
  std::shared_ptr<std::byte> result_;      // which it writes to
  std::function<void(const std::string&)> warn_;
};

}  // namespace multiring
