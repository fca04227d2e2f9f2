#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/export.h"
#include "base/immovable.h"
#include "engine/work.h"

namespace multiring {

/// The first error of a communicator or a named queue, which breaks it: stored, sent to the peers, and raised
/// by the first call where the program has not been told of it. Later calls raise an abort that names it.
///
/// Thread-safe. An owner that queues work stores the error, and takes what is pending, under the lock under
/// which it checks for the error and queues: nothing is queued that nothing fails.
class MULTIRING_API FirstError : Immovable {
 public:
  /// `what` is broken by the error: "communicator 'world'". `rank`: this one.
  FirstError(std::string what, int rank) : what_(std::move(what)), rank_(rank) {}

  /// Returns whether `error` is the first, which is stored.
  bool store(const Error& error);
  bool is_set() const { return set_.load(std::memory_order_acquire); }
  /// Returns the error; empty: there is none.
  std::optional<Error> get() const { return is_set() ? error_ : std::nullopt; }
  /// Whether the program has been told.
  const ErrorSeen& seen() const { return seen_; }
  void note_seen() const { seen_->store(true, std::memory_order_relaxed); }
  /// Raises it, or that the owner is broken, as the program has been told: `seen()`, or that of one
  /// operation.
  void throw_if_set(const ErrorSeen& seen) const {
    if (is_set()) throw_broken(seen);
  }

  /// Returns the exception that is being handled as the error of `operation` on this rank.
  static Error caught(const std::string& operation, int rank, const std::string& host);
  /// Returns `error` as it is sent to the peers. `about`: what they are told besides its text.
  static Error sent(const Error& error, ErrorContext about);

 private:
  [[noreturn]] void throw_broken(const ErrorSeen& seen) const;

  const std::string what_;
  const int rank_;
  const ErrorSeen seen_ = std::make_shared<std::atomic<bool>>(false);
  std::mutex mutex_;            // held while error_ is written; no other lock is taken while it is held
  std::optional<Error> error_;  // written once, before set_ (release), read after (acquire)
  std::atomic<bool> set_{false};
};

}  // namespace multiring
