#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "base/export.h"
#include "base/immovable.h"
#include "collective/collectives.h"
#include "collective/exchange.h"
#include "collective/operation.h"
#include "collective/point_to_point.h"
#include "engine/communicator_options.h"
#include "engine/symmetric_registry.h"
#include "transport/transport.h"

namespace multiring {

/// Runs the operations of a communicator in the calling thread: every one passes `pass`, whether it is a
/// single collective, several that are fused, or a message.
///
/// Collectives run one at a time, which OperationQueue sees to; messages run beside them. Each raises the
/// error that ends it, and leaves it to its caller to break the communicator.
class MULTIRING_API OperationRunner : Immovable {
 public:
  /// One call in progress. The functions that its waits call live as long as it does.
  class Call : public OperationCall, Immovable {
   public:
    Call(const OperationRunner& runner, const Descriptor& descriptor, const CallOptions& options);

   private:
    friend class OperationRunner;
    std::function<void(double)> stalled_;
  };

  /// `options` has to stay.
  OperationRunner(Transport& transport, const CommunicatorOptions& options);

  const CommunicatorOptions& options() const { return options_; }
  Transport& transport() const { return transport_; }
  Exchange& exchange() { return exchange_; }
  const Exchange& exchange() const { return exchange_; }
  SymmetricRegistry& symmetric() { return symmetric_; }
  const SymmetricRegistry& symmetric() const { return symmetric_; }
  double timeout() const { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(double seconds) { timeout_.store(seconds, std::memory_order_relaxed); }
  /// Ends what is in progress, and all that begins later.
  void cancel() { cancelled_.store(true, std::memory_order_release); }
  bool is_cancelled() const { return cancelled_.load(std::memory_order_acquire); }

  /// Completes the descriptor of an operation that the program has asked for.
  void complete(Operation& operation) const;
  /// Takes arrays on devices as they are now, before the operation waits for others. Raises an Error.
  void take_from_devices(Operation& operation);

  void run(const OperationCall& call, Operation& operation);
  /// `call.descriptor`: fused_descriptor() of `operations`.
  void run_fused(const OperationCall& call, std::span<Operation* const> operations);
  /// Sends a message, or receives one.
  void run_message(Operation& operation, std::int64_t tag, const CallOptions& options, bool sends);
  std::optional<MessageInfo> probe(const Descriptor& descriptor, const ProbeRequest& request,
                                   const CallOptions& options);

  /// After a collective that has raised an error, in the thread that ran it, once the peers have been told:
  /// returns when devices work on its arrays no more, or after some seconds.
  void end_failed();
  /// Gives memory on devices back. No operation is in progress, and none follows.
  void release();

 private:
  template <class Body>
  void pass(const OperationCall& call, std::span<Operation* const> operations, const Body& body);
  /// Sets the warning of a call that waits for messages. `for_what()` says whose.
  template <class ForWhat>
  void warn_of_wait(Call& call, const CallOptions& options, const ForWhat& for_what) const;

  const CommunicatorOptions& options_;
  Transport& transport_;
  Exchange exchange_;  // one thread at a time runs collectives
  PointToPoint point_to_point_;
  SymmetricRegistry symmetric_;
  std::atomic<double> timeout_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace multiring
