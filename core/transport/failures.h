#pragma once

#include "base/export.h"
#include "transport/abort_record.h"
#include "transport/waiting.h"

namespace multiring {

/// How the ranks of a group learn of errors and of ranks that end. Any thread.
class MULTIRING_API Failures {
 public:
  /// Ends the waits of all ranks with an error. The first one wins. Best effort if a network fails.
  virtual void abort(const Error& error) noexcept = 0;
  /// The first error of any rank; false if there is none.
  virtual bool aborted(AbortRecord* record) const = 0;
  /// A rank that is known to have ended, preferably one that died.
  virtual WaitResult find_ended() const = 0;
  /// Peers that wait for this rank learn that it left. Idempotent.
  virtual void leave() = 0;
  /// For a fork of the rank's process: releases what would hide the rank's end from peers, and never leaves
  /// in its name. Async-signal-safe apart from closing descriptors; takes no lock.
  virtual void abandon() = 0;
  /// Wakes this process's own waits so that they check `WaitOptions::cancelled`.
  virtual void wake() = 0;

 protected:
  ~Failures() = default;
};

}  // namespace multiring
