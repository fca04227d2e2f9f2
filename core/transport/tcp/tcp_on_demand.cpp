// How a TcpNetwork connects to a rank that does not call connect.

#include <algorithm>
#include <list>
#include <optional>
#include <string>

#include "transport/tcp/handshake/connect_errors.h"
#include "transport/tcp/tcp_network.h"

namespace multiring::tcp {
namespace {

/// Seconds that a store gets for an answer, even where the wait is shorter: what is cut short begins anew.
constexpr double kMinLookup = 0.02;

}  // namespace

WaitResult TcpNetwork::connect_on_demand(std::span<const Link> links, const WaitOptions& waiting) {
  waiting.deadline.start();
  const auto interrupted = [&](WaitResult* result) {
    const bool closed = waiting.is_cancelled();
    if (closed || aborted(nullptr))
      *result = {closed ? WaitResult::Outcome::kCancelled : WaitResult::Outcome::kAborted};
    return !result->ok();
  };
  WaitResult result;
  WaitOptions asking = waiting;
  for (const Link& link : links) {
    check_link(link);
    if (linked(link)) continue;
    try {
      asking.deadline = Deadline::after(std::max(kMinLookup, waiting.deadline.remaining()));
      look_up_address(link.peer, asking);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kTimeout) return {WaitResult::Outcome::kTimeout};
      if (interrupted(&result)) return result;
      throw;
    }
  }
  if (interrupted(&result)) return result;
  std::uint64_t dropped = 0;
  {
    const std::lock_guard lock(mutex_);
    if (left_) throw left_error(ErrorKind::kInternal);
    dropped = attempts_dropped_;
    open_missing(links, true);
  }
  std::optional<Error> error;
  result = drive(waiting, [&](WaitResult* found) {
    if (all_linked(links)) return true;
    if (abort_) *found = {WaitResult::Outcome::kAborted};
    const bool closed = waiting.is_cancelled();
    if (closed) *found = {WaitResult::Outcome::kCancelled};
    if (abort_ || closed) return true;
    reopen_dropped(links, true, dropped);
    error = find_error(links, true, waiting);
    return error.has_value();
  });
  if (!error) return result;
  const std::lock_guard lock(mutex_);
  if (all_linked(links)) return {};  // another thread has driven on
  forget_attempts(links);
  if (error->kind() != ErrorKind::kPeerLost) throw *error;
  const int rank = error->context().peer;
  const Peer& lost = peer(rank);
  return {WaitResult::Outcome::kPeerLost, rank, lost.left, !lost.left && !lost.ending && !lost.dead};
}

bool TcpNetwork::linked(const Link& link) const {
  const std::lock_guard lock(mutex_);
  return is_linked(link);
}

bool TcpNetwork::is_connecting(const ConnectionInfo& info) const {
  return std::any_of(attempts_.begin(), attempts_.end(), [&](const ConnectAttempt& attempt) {
    return attempt.info.server == info.server && attempt.info.channel == info.channel &&
           attempt.info.stripe == info.stripe && attempt.state != ConnectAttempt::State::kDone &&
           attempt.state != ConnectAttempt::State::kFailed;
  });
}

bool TcpNetwork::has_connection(const ConnectionInfo& info, int rank) const {
  if (info.channel == ConnectionInfo::kControl) return !needs_control(peer(rank));
  const auto found = peer(rank).streams.find(info.channel);
  const auto stripe = static_cast<std::size_t>(info.stripe);
  return found != peer(rank).streams.end() && stripe < found->second->stripes() &&
         found->second->has_connection(stripe);
}

void TcpNetwork::drop_attempts(const std::function<bool(const ConnectAttempt&)>& dropped) {
  for (auto next = attempts_.begin(); next != attempts_.end();) {
    const auto each = next++;
    if (!dropped(*each)) continue;
    acceptor_.cancel(*each);
    attempts_.erase(each);
  }
}

}  // namespace multiring::tcp
