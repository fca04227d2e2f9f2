#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/immovable.h"
#include "base/nccl_scope.h"
#include "collective/agreement/round_exchange.h"
#include "collective/operation.h"
#include "device/nccl.h"

namespace multiring {

/// NCCL's communicators of a group of ranks, one for each choice of devices that all its arrays have lain on
/// in one operation: of all ranks, or of those of each host. All ranks make, and do without, the same ones:
/// each decides from what all have published.
class NcclGroups : Immovable {
 public:
  void set_scope(NcclScope scope, const Transport& transport);
  /// Whether the operations of a kind may run by NCCL among these ranks. Thread-safe.
  bool serves(const RoundExchange& exchange, OpKind kind) const;
  /// Whether they do so within each of several hosts (nccl_hierarchy.h).
  bool is_hierarchical(const RoundExchange& exchange) const;
  /// Where warnings go, from any thread.
  void warn_by(std::function<void(const std::string&)> warn) { warn_ = std::move(warn); }

  /// In an operation that all ranks offer to run by NCCL: whether they are to `run` it. If NCCL cannot serve
  /// the devices together, a warning of rank 0 says why, once for these devices.
  bool prepare(RoundExchange& exchange, const OperationCall& call, const Operation& operation);
  /// Runs what this rank asks NCCL for, and calls `meanwhile`.
  void run(
      RoundExchange& exchange, const OperationCall& call, Operation& operation,
      std::span<const nccl::Call> calls, const std::function<void()>& meanwhile = [] {});

  // The parts of `run`.
  nccl::Communicator& communicator() const { return *running_; }
  /// What the device may write to until the operation is finished, or has been ended.
  void keep(std::shared_ptr<std::byte> memory) { used_.push_back(std::move(memory)); }
  void begin(const RoundExchange& exchange, const OperationCall& call, const Operation& operation,
             std::span<const nccl::Call> calls);
  /// Returns when the work is done that the inputs of all ranks come after: who is late is told as in any
  /// other operation.
  void await_inputs(RoundExchange& exchange, const OperationCall& call, const Operation& operation);
  /// Returns when the stream has done all that it has been given.
  void await(const RoundExchange& exchange, const OperationCall& call);
  void finish(RoundExchange& exchange, const OperationCall& call);

  /// After an operation that has raised an error, in the same thread, once the peers have been told: aborts,
  /// which may take seconds.
  void end_failed();
  /// Gives NCCL's memory and threads back. No operation is under way, and none follows.
  void release() { made_.clear(); }

 private:
  std::vector<int> members_of(const RoundExchange& exchange) const;
  nccl::Communicator* find(RoundExchange& exchange, const OperationCall& call, const Operation& operation);
  void tell(const RoundExchange& exchange, const std::string& refusal) const;

  std::map<std::vector<std::int8_t>, std::unique_ptr<nccl::Communicator>> made_;  // by rank; null: not usable
  nccl::Communicator* running_ = nullptr;  // agreed on for the operation in progress, or one that has failed
  std::vector<std::shared_ptr<std::byte>> used_;  // which it writes to
  NcclScope scope_ = NcclScope::kHost;
  bool has_regular_hosts_ = false;  ///< as many ranks on each host, more than one
  std::function<void(const std::string&)> warn_;
};

}  // namespace multiring
