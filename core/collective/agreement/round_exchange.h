#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/export.h"
#include "base/immovable.h"
#include "collective/agreement/agreement.h"
#include "collective/agreement/board.h"
#include "collective/descriptor.h"
#include "transport/transport.h"

namespace multiring {

/// One operation in progress: how it waits and what its errors say.
struct OperationCall {
  const Descriptor& descriptor;
  WaitOptions waiting;
};

/// What the other communicators of this rank know of a rank; empty: nothing.
struct Elsewhere {
  std::function<std::string(int rank)> waits = [](int) { return ""; };  ///< in which it waits for this one
  std::function<std::string(int rank)> was_ended = [](int) { return ""; };  ///< the error of one of them
};

/// Raised where ranks chose different asynchronous operations: all choose again among the first `limit`.
struct ChoiceMismatch {
  std::uint64_t limit;
  bool in_order = false;  ///< one at a time, in the order of submission
};

/// Drives the rounds of a transport: every collective is a sequence of rounds, the first of which compares
/// what the ranks asked for. Turns a wait that failed into an error that says which rank, where, in what.
class MULTIRING_API RoundExchange : Immovable {
 public:
  RoundExchange(Transport& transport, std::string communicator)
      : transport_(transport), communicator_(std::move(communicator)), board_(transport) {}

  int rank() const { return transport_.rank(); }
  int size() const { return transport_.size(); }
  Transport& transport() const { return transport_; }
  std::uint64_t round() const { return board_.round(); }
  /// What the ranks agree on, and what each one has published, in the current round.
  const Agreement& agreement() const { return agreement_; }
  const Board& board() const { return board_; }

  /// The first round of an operation: publishes `descriptor`, calls `stage()`, which may write this rank's
  /// staging memory, waits for all ranks, and checks that they asked for the same.
  ///
  /// Raises timeout, peer lost or aborted; ChoiceMismatch where ranks have submitted different numbers of
  /// asynchronous operations so far, or where fused operations differ or some ranks have held one back; else
  /// a mismatch error that says which rank asked for what. All ranks read the same headers and decide alike.
  template <class Stage>
  void match(const OperationCall& call, const Descriptor& descriptor, const Stage& stage) {
    begin(descriptor);
    stage();
    synchronise(call);
    require_match(call);
  }
  void match(const OperationCall& call, const Descriptor& descriptor) {
    match(call, descriptor, [] {});
  }
  /// A later round of an operation, in which all ranks take part already: calls `stage()`, then waits for
  /// all.
  template <class Stage>
  void next(const OperationCall& call, const Stage& stage) {
    begin(call.descriptor);
    stage();
    synchronise_again(call);
  }
  /// Sets how many bytes of this rank's staging memory others read in this round; 0 unless `stage()` calls
  /// it.
  void staged(std::size_t bytes) { staged_ = bytes; }

  // The parts of `match`.
  void begin(const Descriptor& descriptor) {
    board_.begin(descriptor);
    staged_ = 0;
  }
  void synchronise(const OperationCall& call);

  /// Staging memory of a rank in the current round.
  std::byte* staging(int rank) const { return transport_.staging(rank, round()); }
  [[noreturn]] void throw_mismatch(const OperationCall& call) const;
  /// Raises a mismatch that all ranks see. `alike(a, b)`: whether two ranks did the same, right or wrong.
  [[noreturn]] void throw_mismatch_of(const OperationCall& call, const std::string& text,
                                      const std::function<bool(int, int)>& alike) const;
  /// Raises a mismatch that this rank alone sees. `peer`: with which it does not agree; negative: none.
  [[noreturn]] void throw_mismatch_with(const OperationCall& call, int peer, const std::string& text) const;
  /// Raises an error for data of a peer that cannot be right.
  [[noreturn]] void throw_corrupt(const OperationCall& call, int peer) const;

  /// Turns a wait on one peer (a mailbox) that failed into an error.
  [[noreturn]] void throw_for_peer(const OperationCall& call, const WaitResult& result, int peer) const;
  /// Turns a wait on a mailbox of any of several ranks that failed into an error. `told`: which messages are
  /// here all the same, for a timeout; may be empty.
  [[noreturn]] void throw_for_any(const OperationCall& call, const WaitResult& result, const AnySource& any,
                                  const std::string& told) const;
  /// Turns a wait that failed in the middle of an operation, in which all ranks are, into an error. `peer`:
  /// negative if unknown.
  [[noreturn]] void throw_in_progress(const OperationCall& call, const WaitResult& result, int peer) const;
  /// Turns a wait of this operation that failed into an error.
  [[noreturn]] void throw_for(const OperationCall& call, const WaitResult& result) const;
  /// Raises `error` with the operation and `what` in front of its message.
  [[noreturn]] void throw_within(const OperationCall& call, const Error& error,
                                 const std::string& what) const;
  /// Raises a usage error of this rank's call.
  [[noreturn]] void throw_usage_of(const OperationCall& call, const std::string& what) const;
  /// Raises the error that a peer reported, if there is one.
  void throw_if_aborted(const OperationCall& call) const;
  /// The ranks that this one waits for in the current round.
  Stragglers missing() const { return transport_.stragglers(round()); }
  /// The ranks that this one waits for in the round at which it has arrived last; in the next one it may have
  /// to do its own part yet. Any thread.
  Stragglers awaited() const { return transport_.stragglers(transport_.arrived(rank())); }
  /// " for rank 1; rank 1 (process 12) was last in init", or what else `absent` are; empty: there are none.
  std::string describe_missing(const Stragglers& absent) const;
  /// The warning that a call has waited for so many seconds.
  std::string describe_wait(const OperationCall& call, double waited) const;
  /// "rank 0 on host: send ... on communicator 'world'", as errors and warnings begin.
  std::string where(const OperationCall& call) const;
  /// The last operation that a rank has published: "allreduce 'x' ...", or "init".
  std::string last_operation(int rank) const;
  void set_elsewhere(Elsewhere elsewhere) { elsewhere_ = std::move(elsewhere); }
  /// "rank 3", or "rank 1 (world rank 3)" in a group that numbers its ranks differently.
  std::string name_of(int rank) const;

 private:
  void synchronise_again(const OperationCall& call);
  void require_match(const OperationCall& call) const;
  /// Whether the ranks asked for the same, of which shapes may differ, and would run it differently;
  /// `or_order`: or add in different orders.
  bool differ_in_choice_alone(bool or_order) const;
  [[noreturn]] void throw_timeout(const OperationCall& call) const;
  [[noreturn]] void throw_not_forwarded(const OperationCall& call, const Stragglers& missing) const;
  [[noreturn]] void throw_lost(const OperationCall& call, const WaitResult& result) const;
  /// Returns the reason why a rank has left; empty: not known. Raises the error of another rank that arrives
  /// now.
  std::string cause_of_leaving(const OperationCall& call, int peer) const;
  [[noreturn]] void throw_aborted(const OperationCall& call, const AbortRecord& record) const;
  std::string names_of(const std::vector<int>& ranks) const;
  /// "rank 1 (process 12<status>init", and where it waits for this rank.
  std::string last_operation_text(int rank, const std::string& status) const;
  ErrorContext context(const OperationCall& call, int peer) const;
  ErrorContext context_of_abort(const OperationCall& call, const AbortRecord& record) const;

  Transport& transport_;
  std::string communicator_;
  Board board_;
  const Agreement agreement_{board_};
  std::size_t staged_ = 0;
  Elsewhere elsewhere_;
};

}  // namespace multiring
