#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/export.h"
#include "base/immovable.h"
#include "collective/agreement/round_exchange.h"
#include "collective/operation.h"

namespace multiring {

struct PeerBuffers;

/// Arrays on the devices of one host, in the canonical order, without a copy to the host. Each rank has a
/// buffer in the memory of its device, which the others have as well (CUDA IPC). What collectives do with
/// these is in peer_run.h.
///
/// Buffers are made for each choice of devices that all arrays have lain on in one operation. All ranks make,
/// and do without, the same ones: each decides from what all have published.
class MULTIRING_API PeerMemory : Immovable {
 public:
  PeerMemory();
  ~PeerMemory();

  /// Where warnings go, from any thread.
  void warn_by(std::function<void(const std::string&)> warn) { warn_ = std::move(warn); }

  /// Whether this rank can run an operation, whose arrays lie on one device, in a group of so many. A warning
  /// says once why it has no kernels. Thread-safe.
  bool serves(const Operation& operation, int ranks) const;
  /// In an operation that all ranks offer to run so: whether they are to run it in peer memory. If one of
  /// them cannot, a warning of rank 0 says why, once for these devices.
  bool prepare(RoundExchange& exchange, const OperationCall& call, const Operation& operation);
  /// The buffers, on which that operation works until `end`.
  PeerBuffers& begin(const Operation& operation);
  void end();
  /// After an operation that has raised an error, in the same thread, once the peers have been told: returns
  /// when the device works on the program's arrays no more, or after some seconds.
  void end_failed();
  /// Gives memory back. No operation is under way, and none follows.
  void release();

 private:
  /// Replaces `buffers`, or there is a reason why not, the same on all ranks.
  std::string make(RoundExchange& exchange, const OperationCall& call, const Operation& operation,
                   std::size_t bytes, std::unique_ptr<PeerBuffers>& buffers);
  void tell(const std::string& refusal, bool of_kernels) const;

  std::map<std::vector<std::int8_t>, std::unique_ptr<PeerBuffers>> made_;  // by rank; null: not usable
  std::vector<std::unique_ptr<PeerBuffers>> outgrown_;
  PeerBuffers* agreed_ = nullptr;      // for the operation in progress
  PeerBuffers* running_ = nullptr;     // in an operation, or in one that has failed
  std::shared_ptr<std::byte> result_;  // which it writes to
  std::function<void(const std::string&)> warn_;
};

}  // namespace multiring
