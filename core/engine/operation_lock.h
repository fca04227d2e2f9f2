#pragma once

#include "base/immovable.h"
#include "engine/communicator.h"

namespace multiring {

/// Exclusive use of the exchange: one operation at a time.
class Communicator::OperationLock : Immovable {
 public:
  OperationLock(Communicator& owner, const Operation& operation, const CallOptions& options)
      : owner_(owner), options_(owner.lock_operations(operation, options)) {}
  ~OperationLock() {
    {
      const std::lock_guard lock(owner_.mutex_);
      owner_.busy_ = false;
    }
    owner_.changed_.notify_all();
  }
  /// The call's options with the time that is left.
  const CallOptions& options() const { return options_; }

 private:
  Communicator& owner_;
  const CallOptions options_;
};

}  // namespace multiring
