// How a TcpNetwork connects with a rank that does something else.

#include <algorithm>
#include <list>
#include <optional>
#include <string>

#include "transport/tcp/handshake/connect_errors.h"
#include "transport/tcp/tcp_network.h"

namespace multiring::tcp {

WaitResult TcpNetwork::reach(std::span<const Link> links, const Waiting& waiting) {
  waiting.deadline.start();
  // Whether something else has ended the wait.
  const auto ended = [&](WaitResult* result) {
    const bool closed = waiting.cancelled != nullptr && waiting.cancelled->load(std::memory_order_acquire);
    if (closed || aborted(nullptr))
      *result = {closed ? WaitResult::Outcome::kCancelled : WaitResult::Outcome::kAborted};
    return !result->ok();
  };
  WaitResult result;
  for (const Link& link : links) {
    check_link(link);
    if (linked(link)) continue;
    try {
      find(link.peer, waiting);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kTimeout) return {WaitResult::Outcome::kTimeout};
      if (ended(&result)) return result;
      const std::string why = error.what();
      throw error_between(error.kind(), ends(link.peer, waiting.deadline.elapsed()),
                          "cannot learn the address of",
                          ", to which it has sent nothing before: " + why.substr(0, why.find('\n')) +
                              ". Where rank 0 serves the store, it has to stay until the others are done");
    }
  }
  if (ended(&result)) return result;
  {
    const std::lock_guard lock(mutex_);
    if (left_) throw left_error(ErrorKind::kInternal);
    for (std::list<Call> calls = missing_calls(links, true); !calls.empty();) {
      begun_.splice(begun_.end(), calls, calls.begin());
      door_.call(begun_.back());
    }
  }
  std::optional<Error> error;
  result = drive(waiting, [&](WaitResult* found) {
    if (std::all_of(links.begin(), links.end(), [&](const Link& link) { return ready(link); })) return true;
    if (abort_) *found = {WaitResult::Outcome::kAborted};
    const bool closed = waiting.cancelled != nullptr && waiting.cancelled->load(std::memory_order_acquire);
    if (closed) *found = {WaitResult::Outcome::kCancelled};
    if (abort_ || closed) return true;
    error = trouble(links, begun_, waiting);
    return error.has_value();
  });
  if (!error) return result;
  const std::lock_guard lock(mutex_);
  drop_calls([](const Call& call) { return call.state == Call::State::kFailed; });  // they may be tried again
  std::erase_if(complaints_, [&](const auto& complaint) { return concerns(complaint.first, links); });
  if (error->kind() != ErrorKind::kPeerLost) throw *error;
  const int rank = error->context().peer;
  const bool left = peer(rank).left;
  return {WaitResult::Outcome::kPeerLost, rank, left, !left && !peer(rank).ending};
}

bool TcpNetwork::linked(const Link& link) const {
  const std::lock_guard lock(mutex_);
  return ready(link);
}

bool TcpNetwork::is_calling(const HelloFacts& facts) const {
  return std::any_of(begun_.begin(), begun_.end(), [&](const Call& call) {
    return call.facts.listener == facts.listener && call.facts.channel == facts.channel &&
           call.facts.stripe == facts.stripe && call.state != Call::State::kDone &&
           call.state != Call::State::kFailed;
  });
}

/// Whether this rank has that connection with `rank`.
bool TcpNetwork::stands(const HelloFacts& facts, int rank) const {
  if (facts.channel == HelloFacts::kControl) return !lacks_control(peer(rank));
  const auto found = peer(rank).streams.find(facts.channel);
  const auto stripe = static_cast<std::size_t>(facts.stripe);
  return found != peer(rank).streams.end() && stripe < found->second->stripes() &&
         found->second->has_link(stripe);
}

void TcpNetwork::drop_calls(const std::function<bool(const Call&)>& dropped) {
  for (auto call = begun_.begin(); call != begun_.end();) {
    const auto each = call++;
    if (!dropped(*each)) continue;
    door_.forget(*each);
    begun_.erase(each);
  }
}

}  // namespace multiring::tcp
