#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/export.h"
#include "engine/work.h"

namespace multiring {

/// What a rank submits under one name.
struct NamedRequest {
  /// Called once when all operations have ended, with the error of the first that failed, without locks.
  using Done = std::function<void(const Error* error, std::span<const std::shared_ptr<Work>> works)>;

  std::string name;
  std::vector<Operation> operations;
  int priority = 0;
  std::uint64_t step = 0;      ///< has to be the same on all ranks
  std::uint64_t position = 0;  ///< among those that all ranks submit in one order, from 1; 0: in any order
  std::shared_ptr<void> keep_alive;  ///< held until the last of the works is destroyed
  Done done;                         ///< may be empty
};

/// The operations of one NamedRequest in progress.
class MULTIRING_API Submission final : public WorkObserver {
 public:
  /// Called with every error before it becomes visible, and with what `done` raises.
  using Failed = std::function<void(const Error& error)>;

  /// `owner` identifies the queue in `inside`. `request.operations` are prepared for a communicator. `told`
  /// is set when a wait has raised an error.
  static std::shared_ptr<Submission> make(NamedRequest request, const void* owner,
                                          const ErrorSeen& error_seen, Failed failed);

  const std::string& name() const { return name_; }
  int priority() const { return priority_; }
  std::uint64_t step() const { return step_; }
  std::uint64_t position() const { return position_; }
  /// Empty when all have ended.
  std::vector<std::shared_ptr<Work>> works() const {
    const std::lock_guard lock(mutex_);
    return works_;
  }
  /// Whether the memory of `operation`, or of an operation of `other`, conflicts with that of this one. To be
  /// called before the works are queued.
  bool shares_memory(const Operation& operation) const;
  bool shares_memory(const Submission& other) const;
  double waited() const { return seconds_between(made_, Clock::now()); }
  /// Ends all its work, none of which has been queued.
  void fail(const Error& error);
  /// Drops work that was never queued; `done` is not called.
  void discard() {
    const std::lock_guard lock(mutex_);
    works_.clear();
  }
  /// Whether this thread is in a `done` of that owner.
  static bool inside(const void* owner);

  // With the queue's lock held.
  bool warned = false;
  std::uint64_t number = 0;  ///< in the order of submission on this rank, from 1
  std::vector<std::uint64_t>
      waits_for;  ///< numbers of those that have to be matched before, for their memory

 private:
  Submission() = default;
  void failing(const Error& error) override { failed_(error); }
  void ended(const Error* error) override;
  void all_ended();

  std::string name_;
  int priority_ = 0;
  std::uint64_t step_ = 0;
  std::uint64_t position_ = 0;
  NamedRequest::Done done_;
  Failed failed_;
  const void* owner_ = nullptr;
  Clock::time_point made_ = Clock::now();
  mutable std::mutex mutex_;                  // guards all below; no other lock is taken while it is held
  std::vector<std::shared_ptr<Work>> works_;  // until all have ended
  std::size_t unfinished_ = 0;
  std::optional<Error> first_error_;
};

}  // namespace multiring
