#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/export.h"
#include "collective/descriptor.h"
#include "collective/plan_cache.h"
#include "transport/transport.h"

namespace multiring {

/// One operation in progress: how it waits and what its errors say.
struct Call {
  const Descriptor& descriptor;
  Waiting waiting;
};

/// All ranks are to choose anew among their first `submitted` asynchronous operations.
struct NotYetAgreed {
  std::uint64_t submitted;
  bool singly = false;  ///< one, not several fused
};

/// A rank's walk through the rounds of a transport: every collective is a sequence of rounds, the first of
/// which compares what the ranks asked for. Turns a wait that failed into an error that says who, where,
/// what.
class MULTIRING_API Exchange {
 public:
  Exchange(Transport& transport, std::string communicator)
      : transport_(transport), communicator_(std::move(communicator)) {}

  int rank() const { return transport_.rank(); }
  int size() const { return transport_.size(); }
  Transport& transport() const { return transport_; }
  std::uint64_t round() const { return round_; }
  PlanCache& plans() { return plans_; }

  /// Enters the next round: from here on this rank's staging memory of it may be written. Its header says
  /// what the rank does, to be compared in an operation's first round and told in errors in all.
  void begin(const Descriptor& descriptor);
  /// This rank's staging memory of the round holds so many bytes that others are to read. Without it none.
  void staged(std::size_t bytes) { staged_ = bytes; }
  /// Arrives and waits for all ranks. Raises timeout, peer lost or aborted.
  void synchronise(const Call& call);
  /// The same in a later round of an operation, which all ranks are in.
  void synchronise_again(const Call& call);

  /// Staging memory and descriptor of a rank in the current round.
  std::byte* staging(int rank) const { return transport_.staging(rank, round_); }
  const Descriptor& descriptor(int rank) const {
    return *reinterpret_cast<const Descriptor*>(transport_.header(rank, round_));
  }
  /// Returns when all ranks asked for the same in the current round. Raises NotYetAgreed where the difference
  /// may come from ranks having submitted different numbers of asynchronous operations so far, and where it
  /// is in one of several that are fused, which by itself will tell which one; else a mismatch error that
  /// says who asked for what. All ranks come to the same verdict, for they read the same headers.
  void require_match(const Call& call) const;
  [[noreturn]] void throw_mismatch(const Call& call) const;
  /// What a rank has written cannot be right.
  [[noreturn]] void throw_garbled(const Call& call, int peer) const;

  /// Turns a wait on one peer (a mailbox) that failed into an error.
  [[noreturn]] void throw_for_peer(const Call& call, const WaitResult& result, int peer) const;
  /// The same in the middle of an operation that all ranks are in. `peer`: whom the wait was for; negative:
  /// not known.
  [[noreturn]] void throw_on_the_way(const Call& call, const WaitResult& result, int peer) const;
  /// Turns a wait of this operation that ended badly into an error.
  [[noreturn]] void throw_for(const Call& call, const WaitResult& result) const;
  /// Raises an error of the operation that says what `error` says, which knows nothing of it; `what` is in
  /// between.
  [[noreturn]] void throw_within(const Call& call, const Error& error, const std::string& what) const;
  /// What this rank's user has done wrong in the call.
  [[noreturn]] void throw_usage_of(const Call& call, const std::string& what) const;
  /// Raises the error that a peer told of, if there is one.
  void throw_if_aborted(const Call& call) const;
  /// The ranks that keep this one waiting for the current round, and the same as text for a warning.
  Stragglers missing() const { return transport_.stragglers(round_); }
  std::string describe_wait(const Call& call, double waited) const;
  /// "rank 0 on host: send ... on communicator 'world'", as errors and warnings begin.
  std::string where(const Call& call) const;
  /// What a rank was last in, as it has published: "allreduce 'x' ...", or "init".
  std::string last_of(int rank) const;
  /// `elsewhere` tells what a rank waits for this rank in, outside of this exchange; empty: nothing is known.
  void ask_elsewhere(std::function<std::string(int rank)> elsewhere) { elsewhere_ = std::move(elsewhere); }
  /// "rank 3", or "rank 1 (world rank 3)" in a group that numbers its ranks differently.
  std::string name_of(int rank) const;

 private:
  bool all_match() const;
  [[noreturn]] void throw_timeout(const Call& call) const;
  [[noreturn]] void throw_held_up(const Call& call, const Stragglers& missing) const;
  [[noreturn]] void throw_lost(const Call& call, const WaitResult& result) const;
  [[noreturn]] void throw_aborted(const Call& call, const AbortRecord& record) const;
  std::string names_of(const std::vector<int>& ranks) const;
  /// "rank 1 (process 12 on b<sign>) was last in init", and where it waits for this rank.
  std::string whereabouts(int rank, const std::string& sign) const;
  ErrorContext context(const Call& call, int peer) const;

  Transport& transport_;
  std::string communicator_;
  std::uint64_t round_ = 0;
  std::size_t staged_ = 0;
  PlanCache plans_;
  std::function<std::string(int rank)> elsewhere_;
};

}  // namespace multiring
