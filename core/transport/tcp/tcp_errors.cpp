// Why a TcpNetwork has not connected.

#include <algorithm>

#include "transport/tcp/handshake/connect_errors.h"
#include "transport/tcp/tcp_network.h"

namespace multiring::tcp {

RankPair TcpNetwork::rank_pair(int rank, double waited) const {
  return {options_.rank,
          own_.host,
          rank,
          known_host(rank),
          waited,
          world_rank(options_.rank),
          world_rank(rank),
          options_.connected_before};
}

int TcpNetwork::world_rank(int rank) const {
  const bool known = rank >= 0 && static_cast<std::size_t>(rank) < options_.world.size();
  return known ? options_.world[static_cast<std::size_t>(rank)] : rank;
}

Error TcpNetwork::left_error(ErrorKind kind) const {
  return Error(
      kind, "rank " + std::to_string(world_rank(options_.rank)) + " has left and opens no more connections");
}

Error TcpNetwork::aborted_error() const {
  ErrorContext context;
  context.rank = options_.rank;
  context.peer = abort_->origin == options_.rank ? -1 : abort_->origin;
  context.host = own_.host;
  return Error(abort_->kind, abort_->message, context);
}

std::optional<Error> TcpNetwork::find_error(std::span<const Link> links, bool of_both,
                                            const WaitOptions& waiting) const {
  const double waited = waiting.deadline.elapsed();
  if (abort_) return aborted_error();
  if (left_) return left_error(ErrorKind::kAborted);
  for (const auto& [rank, rejection] : rejections_)
    if (concerns(rank, rejection.channel, links))
      return rejection_error(rank_pair(rank, waited), rejection.verdict);
  // What only the peer has to open may still come, though this rank's own attempts have failed.
  for (const ConnectAttempt& attempt : attempts_)
    if (attempt.state == ConnectAttempt::State::kFailed && !peer(attempt.info.server).left &&
        (of_both || attempt.info.server < options_.rank) &&
        concerns(attempt.info.server, attempt.info.channel, links))
      return attempt_error(rank_pair(attempt.info.server, waited), attempt);
  for (const Link& link : links) {
    const Peer& other = peer(link.peer);
    if (is_linked(link) || !(other.ending || other.left || other.dead)) continue;
    // An answer from before its end may still arrive.
    const bool connecting =
        std::any_of(attempts_.begin(), attempts_.end(), [&](const ConnectAttempt& attempt) {
          return attempt.info.server == link.peer && attempt.state != ConnectAttempt::State::kDone &&
                 attempt.state != ConnectAttempt::State::kFailed;
        });
    if (!connecting || other.dead)
      return error_between(ErrorKind::kPeerLost, rank_pair(link.peer, waited), "lost its connection to",
                           other.left ? ", which has left"
                                      : ": it has ended, or the network between them is cut. Look at its "
                                        "output");
  }
  return std::nullopt;
}

Error TcpNetwork::timeout_error(std::span<const Link> links, const WaitOptions& waiting) const {
  const double waited = waiting.deadline.elapsed();
  for (const ConnectAttempt& attempt : attempts_)
    if (attempt.state != ConnectAttempt::State::kDone &&
        concerns(attempt.info.server, attempt.info.channel, links))
      return error_between(ErrorKind::kTimeout, rank_pair(attempt.info.server, waited),
                           "waited for a connection to", ": " + attempt_progress(attempt));
  const auto missing =
      std::find_if(links.begin(), links.end(), [&](const Link& link) { return !is_linked(link); });
  const std::uint64_t unauthenticated = acceptor_.rejected().unauthenticated;
  return error_between(ErrorKind::kTimeout, rank_pair(missing->peer, waited), "waited for a connection from",
                       " at " + own_.addresses.front().address.text() +
                           ": it has not reached this point, or cannot reach this address" +
                           (unauthenticated == 0 ? ""
                                                 : "; " + std::to_string(unauthenticated) +
                                                       " clients did not know the job's secret"));
}

}  // namespace multiring::tcp
