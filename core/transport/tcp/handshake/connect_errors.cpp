#include "transport/tcp/handshake/connect_errors.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

namespace multiring::tcp {
namespace {

std::string text_of(int error) { return std::generic_category().message(error); }

std::string path_text(const ConnectAttempt& attempt) {
  return attempt.from.address.host_text() + " (" + attempt.from.interface + ") to " +
         attempt.to.address.text() + " (" + attempt.to.interface + ")";
}

/// What the kernel says when the host or its network is gone, or the address that this host had there. Before
/// ranks were connected most of these are mistakes in the choice of interfaces.
bool is_loss(int error, bool connected_before) {
  constexpr std::array kAtAnyTime{EHOSTUNREACH};
  constexpr std::array kOfConnected{ENETUNREACH, ENETDOWN, EHOSTDOWN, ENONET,
                                    EACCES,      EPERM,    EINVAL,    EADDRNOTAVAIL};
  const auto has = [&](const auto& errors) {
    return std::find(errors.begin(), errors.end(), error) != errors.end();
  };
  return has(kAtAnyTime) || (connected_before && has(kOfConnected));
}

Error rejected(const RankPair& ranks, const ConnectAttempt& attempt) {
  switch (attempt.verdict) {
    case Verdict::kOtherSecret:
      return error_between(
          ErrorKind::kUsage, ranks, "does not know the secret of",
          " at " + attempt.to.address.text() +
              ": they belong to different jobs, or MULTIRING_SECRET is not the same on both");
    case Verdict::kWrongRank:
      return error_between(ErrorKind::kUsage, ranks, "connected to",
                           " at " + attempt.to.address.text() +
                               ", but another rank answered: do two jobs share a "
                               "store, or two processes a rank?");
    case Verdict::kDuplicate:
      return error_between(ErrorKind::kUsage, ranks, "was rejected by",
                           ", which has this connection already: two processes claim to be rank " +
                               std::to_string(ranks.world_rank) +
                               " of this job. Has the launcher given every process its own rank?");
    case Verdict::kOtherSettings:
    case Verdict::kAccepted:
    case Verdict::kSimultaneous:
      break;
  }
  return error_between(ErrorKind::kUsage, ranks, "runs another version of multiring or other settings than",
                       ": compare `multiring env` on both");
}

}  // namespace

Error error_between(ErrorKind kind, const RankPair& ranks, const std::string& what, const std::string& rest) {
  ErrorContext context;
  context.rank = ranks.rank;
  context.peer = ranks.peer;
  context.host = ranks.host;
  context.operation = "connect";
  context.elapsed = ranks.waited;
  return Error(kind,
               "rank " + std::to_string(ranks.world_rank) + " on " + ranks.host + " " + what + " rank " +
                   std::to_string(ranks.world_peer) +
                   (ranks.peer_host.empty() ? "" : " on " + ranks.peer_host) + rest,
               context);
}

Error attempt_error(const RankPair& ranks, const ConnectAttempt& attempt) {
  if (attempt.unauthenticated)
    return error_between(
        ErrorKind::kPeerLost, ranks, "did not reach",
        ": a process that is not part of this job answered: " + path_text(attempt) +
            ". The rank has ended, and another program listens at its address; or the address "
            "belongs to another host: exclude it with MULTIRING_INTERFACES");
  if (attempt.verdict != Verdict::kAccepted) return rejected(ranks, attempt);
  if (attempt.error == ECONNREFUSED || attempt.error == ECONNRESET)
    return error_between(ErrorKind::kPeerLost, ranks, "cannot connect to",
                         ": " + path_text(attempt) + ": " + text_of(attempt.error) +
                             ". It has ended, look at its output; or a firewall is between them");
  if (is_loss(attempt.error, ranks.connected_before))
    return error_between(ErrorKind::kPeerLost, ranks, "lost",
                         ": its process has died, or its host cannot be reached any more: " +
                             path_text(attempt) + ": " + text_of(attempt.error) +
                             ". If it never could be, a firewall between them refuses the connection, or "
                             "they share another network: choose its interfaces with MULTIRING_INTERFACES");
  if (attempt.error == EMFILE || attempt.error == ENFILE)
    return error_between(ErrorKind::kUsage, ranks, "has no descriptor left for a connection to",
                         ": " + text_of(attempt.error) +
                             ". Every peer takes one connection, and one more for each channel and " +
                             "pair of interfaces: raise the limit (ulimit -n" +
                             (attempt.error == ENFILE ? ", or fs.file-max of the host" : "") +
                             "), or use fewer channels or connections per interface");
  return error_between(ErrorKind::kUsage, ranks, "cannot reach",
                       ": " + path_text(attempt) + ": " + text_of(attempt.error) +
                           ". Choose interfaces of a network that both share with MULTIRING_INTERFACES");
}

Error rejection_error(const RankPair& ranks, Verdict verdict) {
  if (verdict == Verdict::kDuplicate)
    return error_between(ErrorKind::kUsage, ranks, "was connected to twice by",
                         ": two processes claim to be this rank. Has the launcher given every process "
                         "its own rank?");
  return error_between(ErrorKind::kUsage, ranks, "runs another version of multiring or other settings than",
                       ": compare `multiring env` on both");
}

std::string attempt_progress(const ConnectAttempt& attempt) {
  switch (attempt.state) {
    case ConnectAttempt::State::kConnecting:
      return path_text(attempt) + ": no answer from its host; is a firewall between them?";
    case ConnectAttempt::State::kHandshake:
      return path_text(attempt) + ": its host answers, the rank does not: it has not reached this point";
    case ConnectAttempt::State::kBackoff:
      if (attempt.error == ETIMEDOUT)
        return path_text(attempt) + ": no answer from its host, " + std::to_string(attempt.tries) +
               " times; is a firewall between them?";
      return path_text(attempt) + ": it closed the connection " + std::to_string(attempt.tries) + " times";
    case ConnectAttempt::State::kDone:
    case ConnectAttempt::State::kFailed:
      break;
  }
  return path_text(attempt);
}

}  // namespace multiring::tcp
