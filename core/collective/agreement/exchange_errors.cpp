// What an exchange says when something goes wrong: mismatches, and waits that failed.

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "base/text.h"
#include "collective/agreement/odd_rank.h"
#include "collective/agreement/round_exchange.h"
#include "collective/kinds.h"
#include "collective/rank_list.h"

namespace multiring {
namespace {

std::string describe_request(const Descriptor& descriptor) {
  if (!descriptor.asynchronous) return describe(descriptor);
  return describe(descriptor) + " (asynchronous operation " + std::to_string(descriptor.key.sequence) + ")";
}

// What a reduce_scatter compares besides is in reduce_scatter.cpp.
bool same_request(const Descriptor& a, const Descriptor& b) {
  return same_key(a.key, b.key) && (a.key.kind != OpKind::kReduceScatter || a.rows == b.rows);
}

/// Copies memory that may be written meanwhile; the caller checks for that. Hidden from sanitizers.
__attribute__((no_sanitize("thread"))) Descriptor copy_unsynchronised(const std::byte* from) {
  std::array<std::uint64_t, sizeof(Descriptor) / sizeof(std::uint64_t)> words;
  static_assert(sizeof words == sizeof(Descriptor));
  const auto* begin = reinterpret_cast<const std::uint64_t*>(from);
  // Acquire: later loads come after these.
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = __atomic_load_n(begin + i, __ATOMIC_ACQUIRE);
  Descriptor copy;
  std::memcpy(static_cast<void*>(&copy), words.data(), sizeof copy);
  return copy;
}

/// What to do where ranks wait for each other in different communicators; empty: they do not.
std::string advice_on_order(const Elsewhere& elsewhere, const std::vector<int>& late) {
  const auto waits = [&](int rank) { return !elsewhere.waits(rank).empty(); };
  if (std::ranges::none_of(late, waits)) return "";
  return "Ranks have to use their communicators in the same order: most often one rank has fewer batches "
         "(hooks.join(), or what 'Uneven data' says in the guide of your framework), or a call that all "
         "ranks must make stands behind `if comm.rank == 0:`";
}

[[noreturn]] void throw_waited(const RoundExchange& exchange, const OperationCall& call,
                               const std::string& what, const ErrorContext& context) {
  throw Error(ErrorKind::kTimeout,
              exchange.where(call) + ", waited " + seconds_text(call.waiting.deadline.elapsed()) + what +
                  " MULTIRING_TIMEOUT or the timeout argument set how long to wait.",
              context);
}

}  // namespace

bool RoundExchange::differ_in_choice_alone(bool or_order) const {
  const auto key_of = [&](int peer) {
    MatchKey key = board_.of(peer).key;
    key.algorithm = 0;
    if (or_order) key.order = {};
    return key;
  };
  const int odd = board_.find([&](int peer) { return !same_key(key_of(peer), key_of(0)); });
  return odd < 0 && !agreement_.all_match();
}

void RoundExchange::throw_mismatch(const OperationCall& call) const {
  std::map<std::string, std::vector<int>> asked;
  for (int peer = 0; peer < size(); ++peer) asked[describe_request(board_.of(peer))].push_back(peer);
  std::string text = "the ranks of communicator '" + communicator_ + "' asked for different operations: ";
  bool first = true;
  for (const auto& [what, ranks] : asked) {
    text += (first ? "" : "; ") + names_of(ranks) + " asked for " + what;
    first = false;
  }
  if (differ_in_choice_alone(false)) {
    text = "the ranks of communicator '" + communicator_ + "' would run " +
           describe_request(call.descriptor) +
           " by different algorithms. All ranks need the same tuning, mode and settings: compare "
           "MULTIRING_TUNING, MULTIRING_MODE and MULTIRING_STAGING_BYTES";
  } else if (differ_in_choice_alone(true)) {
    text += ". All ranks need the same order of additions: compare MULTIRING_ORDER and the arguments `order`";
  } else {
    if (asked.size() == 1) text += " (names alike at the start, but different in all their length)";
    text +=
        ". Every rank has to issue the same operations in the same order; look for a branch, a shape or a "
        "loop length that depends on the rank";
  }
  throw_mismatch_of(call, text + ". (raised on " + where(call) + ")",
                    [this](int a, int b) { return same_request(board_.of(a), board_.of(b)); });
}

void RoundExchange::throw_mismatch_of(const OperationCall& call, const std::string& text,
                                      const std::function<bool(int, int)>& alike) const {
  ErrorContext about = context(call, -1);
  note_odd_rank(about, rank(), size(), alike);
  throw Error(ErrorKind::kMismatch, text, about);
}

void RoundExchange::throw_mismatch_with(const OperationCall& call, int peer, const std::string& text) const {
  throw Error(ErrorKind::kMismatch, text, context(call, peer));
}

void RoundExchange::throw_corrupt(const OperationCall& call, int peer) const {
  throw Error(ErrorKind::kInternal,
              where(call) + ": what " + name_of(peer) + " on " + transport_.host(peer) +
                  " asked for makes no sense. Do all ranks run the same version of multiring? Compare "
                  "`multiring env` on both",
              context(call, peer));
}

void RoundExchange::throw_for(const OperationCall& call, const WaitResult& result) const {
  switch (result.outcome) {
    case WaitResult::Outcome::kTimeout:
      throw_timeout(call);
    case WaitResult::Outcome::kPeerLost:
      throw_lost(call, result);
    case WaitResult::Outcome::kAborted:
      throw_if_aborted(call);
      break;
    case WaitResult::Outcome::kCancelled:
      throw Error(ErrorKind::kAborted, "communicator '" + communicator_ + "' was closed on " + where(call),
                  context(call, -1));
    case WaitResult::Outcome::kArrived:
      break;
  }
  throw Error(ErrorKind::kInternal, "a wait failed for no known reason on " + where(call), context(call, -1));
}

void RoundExchange::throw_within(const OperationCall& call, const Error& error,
                                 const std::string& what) const {
  throw Error(error.kind(), where(call) + what + ": " + error.what(), context(call, -1));
}

void RoundExchange::throw_usage_of(const OperationCall& call, const std::string& what) const {
  throw Error(ErrorKind::kUsage, where(call) + ": " + what, context(call, -1));
}

void RoundExchange::throw_for_peer(const OperationCall& call, const WaitResult& result, int peer) const {
  if (result.outcome != WaitResult::Outcome::kTimeout) throw_for(call, result);
  throw_waited(*this, call,
               " for " + name_of(peer) + " (process " + std::to_string(transport_.process_id(peer)) +
                   "), which has not done its part. Does it call the matching send or recv?",
               context(call, peer));
}

void RoundExchange::throw_for_any(const OperationCall& call, const WaitResult& result, const AnySource& any,
                                  const std::string& told) const {
  const bool timeout = result.outcome == WaitResult::Outcome::kTimeout;
  if (timeout) throw_if_aborted(call);
  const bool one = any.sources().size() == 1;
  if (one && timeout && told.empty()) throw_for_peer(call, result, any.sources().front());
  const std::string names = names_of(any.sources());
  if (timeout)
    throw_waited(*this, call,
                 " for a message of " + (one ? names : "any of " + names) +
                     (told.empty() ? ", none of which has sent one" : ": " + told) + ".",
                 context(call, one ? any.sources().front() : -1));
  if (result.outcome != WaitResult::Outcome::kPeerLost || one || !any.all_ended()) throw_for(call, result);
  throw_if_aborted(call);
  const std::string cause = cause_of_leaving(call, result.peer);
  throw Error(ErrorKind::kPeerLost,
              where(call) + ", waited for a message of any of " + names + ", and all of them have left" +
                  (any.any_gone() ? " or died" : "") + ": none can come" +
                  (cause.empty() ? "" : "; " + cause) + ". Look at the output of those ranks.",
              context(call, result.peer));
}

void RoundExchange::throw_in_progress(const OperationCall& call, const WaitResult& result, int peer) const {
  if (result.outcome != WaitResult::Outcome::kTimeout) throw_for(call, result);
  const std::string late = peer < 0 ? "other ranks"
                                    : name_of(peer) + " on " + transport_.host(peer) + " (process " +
                                          std::to_string(transport_.process_id(peer)) + ")";
  throw_waited(*this, call,
               ", at last for " + late +
                   ". All ranks are in this operation: one of them is stopped, which may be another one that "
                   "this one waits for, or the network has stalled; `ps -o pid,stat,cmd` shows a stopped "
                   "process as T.",
               context(call, peer));
}

std::string RoundExchange::describe_missing(const Stragglers& absent) const {
  std::string text;
  if (!absent.late.empty())
    text += " for " + missing_list(absent, transport_);
  else if (!absent.forwarding.empty())
    text += ": " + not_forwarded_text(absent.forwarding, transport_);
  constexpr std::size_t kMaxListed = 4;
  for (std::size_t i = 0; i < std::min(absent.late.size(), kMaxListed); ++i)
    text += "; " + last_operation_text(absent.late[i], ") was last in ");
  return text;
}

std::string RoundExchange::describe_wait(const OperationCall& call, double waited) const {
  const Stragglers absent = missing();
  const std::string advice = advice_on_order(elsewhere_, absent.late);
  const bool on_devices = absent.late.empty() && call.descriptor.offered_device >= 0;
  return where(call) + ", has waited " + seconds_text(waited) +
         (on_devices ? " for devices, or NCCL: all ranks have come" : describe_missing(absent)) +
         (advice.empty() ? "" : ". " + advice) + kHowToSilence;
}

void RoundExchange::throw_timeout(const OperationCall& call) const {
  const Stragglers absent = missing();
  if (absent.late.empty()) throw_not_forwarded(call, absent);
  std::vector<int> came;
  for (int peer = 0; peer < size(); ++peer)
    if (transport_.has_reached(peer, round())) came.push_back(peer);
  std::string text =
      " for " + missing_list(absent, transport_) + "; " + names_of(came) + " came and waited as well. ";
  for (const int peer : absent.late) {
    std::string last = last_operation_text(
        peer, transport_.is_watched(peer) ? ", alive) was last in " : ") was last heard of in ");
    last.front() = 'R';
    text += last + ". ";
  }
  const std::string advice = advice_on_order(elsewhere_, absent.late);
  text += advice.empty() ? "" : advice + ". ";
  text += "See where it is with `py-spy dump --pid " +
          std::to_string(transport_.process_id(absent.late.front())) + "`;";
  throw_waited(*this, call, text, context(call, absent.late.front()));
}

/// What ranks publish may be forwarded by others, which may stop after they have come themselves.
void RoundExchange::throw_not_forwarded(const OperationCall& call, const Stragglers& missing) const {
  throw_waited(*this, call, ": " + not_forwarded_text(missing.forwarding, transport_) + ".",
               context(call, missing.forwarding.empty() ? -1 : missing.forwarding.front()));
}

void RoundExchange::throw_lost(const OperationCall& call, const WaitResult& result) const {
  const int peer = result.peer;
  std::string died = result.peer_gone ? "nothing answers at its address: it has exited or died"
                                      : "its process has died (killed, crashed or out of memory)";
  if (transport_.host(peer) != transport_.host(rank())) died += ", or its host cannot be reached any more";
  const std::string cause = result.peer_left ? cause_of_leaving(call, peer) : std::string();
  const std::string left =
      !cause.empty() ? "it has left, and " + cause
                     : "it has shut down or exited while others still needed it (had it fewer "
                       "batches than the others, is a collective behind `if comm.rank == 0:`, or did "
                       "it catch an error and leave?)";
  throw Error(ErrorKind::kPeerLost,
              where(call) + ", lost " + name_of(peer) + " on " + transport_.host(peer) + " (process " +
                  std::to_string(transport_.process_id(peer)) + "): " + (result.peer_left ? left : died) +
                  ". It was last in " + last_operation(peer) + ". Look at that rank's output.",
              context(call, peer));
}

// It may have left because of an error elsewhere, which may arrive after its goodbye.
std::string RoundExchange::cause_of_leaving(const OperationCall& call, int peer) const {
  for (int times = 0; times < kCauseChecks; ++times) {
    if (const std::string cause = elsewhere_.was_ended(peer); !cause.empty()) return cause;
    std::this_thread::sleep_for(kBetweenCauseChecks);
    throw_if_aborted(call);
  }
  return "";
}

void RoundExchange::throw_if_aborted(const OperationCall& call) const {
  AbortRecord record;
  if (transport_.aborted(&record)) throw_aborted(call, record);
}

void RoundExchange::throw_aborted(const OperationCall& call, const AbortRecord& record) const {
  const bool own = record.origin == rank();
  throw Error(record.kind,
              (own ? std::string() : name_of(record.origin) + " stopped all ranks: ") + record.message +
                  (own ? std::string() : " (noticed on " + where(call) + ")"),
              context_of_abort(call, record));
}

// All ranks are told the same peer, whether this rank has seen itself what is wrong or another rank's error
// came first. The record names an operation where this rank's call is not the one that is meant
// (Communicator::abort_with).
ErrorContext RoundExchange::context_of_abort(const OperationCall& call, const AbortRecord& record) const {
  const bool own = record.origin == rank();
  const ErrorContext& about = record.about;
  ErrorContext result = context(call, own ? -1 : record.origin);
  if (record.kind != ErrorKind::kMismatch) {
    if (about.odd >= 0 && about.odd != rank()) result.peer = about.odd;
    return result;
  }
  if (!about.operation.empty() || !about.tensor.empty()) {
    result.operation = about.operation;
    result.tensor = about.tensor;
  }
  if (about.odd < 0) return result;
  result.common = about.common;
  result.odd = about.odd;
  result.peer = about.odd == rank() ? about.common : about.odd;
  return result;
}

std::string RoundExchange::last_operation_text(int rank, const std::string& status) const {
  std::string text = name_of(rank) + " (process " + std::to_string(transport_.process_id(rank)) + status +
                     last_operation(rank);
  const std::string other = elsewhere_.waits(rank);
  if (!other.empty()) text += ", and waits for this rank in " + other;
  return text;
}

std::string RoundExchange::names_of(const std::vector<int>& ranks) const {
  return rank_list(ranks, transport_);
}

std::string RoundExchange::name_of(int rank) const {
  if (rank < 0 || rank >= size()) return "rank " + std::to_string(rank);
  return names_of({rank});
}

std::string RoundExchange::where(const OperationCall& call) const {
  const std::string bytes = takes_any_array(call.descriptor)
                                ? std::string()
                                : " (" + std::to_string(call.descriptor.bytes) + " bytes)";
  return name_of(rank()) + " on " + transport_.host(rank()) + ", in " + describe(call.descriptor) + bytes +
         " of communicator '" + communicator_ + "'";
}

std::string RoundExchange::last_operation(int peer) const {
  // A slow peer writes the other of its two headers next, and this one only after that round: then what was
  // read may be a mix.
  for (;;) {
    const std::uint64_t round = transport_.arrived(peer);
    if (round == 0) return "init";
    const Descriptor last = copy_unsynchronised(transport_.header(peer, round));
    if (transport_.arrived(peer) == round)
      return is_plausible(last) ? describe(last) : "something that cannot be read";
  }
}

ErrorContext RoundExchange::context(const OperationCall& call, int peer) const {
  ErrorContext context;
  context.rank = rank();
  context.peer = peer;
  context.host = transport_.host(rank());
  context.operation = traits_of(call.descriptor).name;
  context.tensor = call.descriptor.name_view();
  context.bytes = static_cast<std::int64_t>(call.descriptor.bytes);
  context.elapsed = call.waiting.deadline.elapsed();
  return context;
}

}  // namespace multiring
