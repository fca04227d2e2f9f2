#include "transport/tcp/handshake/connect_errors.h"

#include <cerrno>
#include <system_error>

namespace multiring::tcp {
namespace {

std::string text_of(int error) { return std::generic_category().message(error); }

std::string way(const Call& call) {
  return call.from.address.host_text() + " (" + call.from.interface + ") to " + call.to.address.text() +
         " (" + call.to.interface + ")";
}

Error refused(const TwoEnds& ends, const Call& call) {
  switch (call.verdict) {
    case Verdict::kOtherSecret:
      return error_between(
          ErrorKind::kUsage, ends, "does not know the secret of",
          " at " + call.to.address.text() +
              ": they belong to different jobs, or MULTIRING_SECRET is not the same on both");
    case Verdict::kWrongRank:
      return error_between(ErrorKind::kUsage, ends, "called",
                           " at " + call.to.address.text() +
                               ", but another rank answered: do jobs share a "
                               "store, or a rank's number?");
    case Verdict::kDuplicate:
      return error_between(ErrorKind::kUsage, ends, "was refused by",
                           ", which has this connection already: two processes say that they are rank " +
                               std::to_string(ends.world_rank) +
                               " of this job. Has the launcher given every process its own rank?");
    case Verdict::kOtherSettings:
    case Verdict::kWelcome:
    case Verdict::kCrossed:
      break;
  }
  return error_between(ErrorKind::kUsage, ends, "runs another version of multiring or other settings than",
                       ": compare `multiring env` on both");
}

}  // namespace

Error error_between(ErrorKind kind, const TwoEnds& ends, const std::string& what, const std::string& rest) {
  ErrorContext context;
  context.rank = ends.rank;
  context.peer = ends.peer;
  context.host = ends.host;
  context.operation = "connect";
  context.elapsed = ends.waited;
  return Error(kind,
               "rank " + std::to_string(ends.world_rank) + " on " + ends.host + " " + what + " rank " +
                   std::to_string(ends.world_peer) + (ends.peer_host.empty() ? "" : " on " + ends.peer_host) +
                   rest,
               context);
}

Error call_error(const TwoEnds& ends, const Call& call) {
  if (call.stranger)
    return error_between(
        ErrorKind::kPeerLost, ends, "found somebody else in the place of",
        ", who does not belong to this job: " + way(call) +
            ". The rank has ended, and another program listens at its address; or an address "
            "leads elsewhere, and MULTIRING_INTERFACES has to leave it out");
  if (call.verdict != Verdict::kWelcome) return refused(ends, call);
  if (call.error == ECONNREFUSED || call.error == ECONNRESET)
    return error_between(ErrorKind::kPeerLost, ends, "cannot connect to",
                         ": " + way(call) + ": " + text_of(call.error) +
                             ". It has ended, look at its output; or a firewall is between them");
  if (call.error == EMFILE || call.error == ENFILE)
    return error_between(ErrorKind::kUsage, ends, "has no descriptor left for a connection to",
                         ": " + text_of(call.error) +
                             ". Every peer takes one connection, and one more for each channel and " +
                             "pair of interfaces: raise the limit (ulimit -n" +
                             (call.error == ENFILE ? ", or fs.file-max of the host" : "") +
                             "), or use fewer channels or connections per interface");
  return error_between(ErrorKind::kUsage, ends, "cannot reach",
                       ": " + way(call) + ": " + text_of(call.error) +
                           ". Choose interfaces of a network that both share with MULTIRING_INTERFACES");
}

Error caller_error(const TwoEnds& ends, Verdict verdict) {
  if (verdict == Verdict::kDuplicate)
    return error_between(ErrorKind::kUsage, ends, "was called twice by",
                         ": two processes say that they are this rank. Has the launcher given every process "
                         "its own rank?");
  return error_between(ErrorKind::kUsage, ends, "runs another version of multiring or other settings than",
                       ": compare `multiring env` on both");
}

std::string call_progress(const Call& call) {
  switch (call.state) {
    case Call::State::kCalling:
      return way(call) + ": no answer from its host; is a firewall between them?";
    case Call::State::kAnswered:
      return way(call) + ": its host answers, the rank does not: it has not come so far";
    case Call::State::kPause:
      if (call.error == ETIMEDOUT)
        return way(call) + ": no answer from its host, " + std::to_string(call.attempts) +
               " times; is a firewall between them?";
      return way(call) + ": it hung up " + std::to_string(call.attempts) + " times";
    case Call::State::kDone:
    case Call::State::kFailed:
      break;
  }
  return way(call);
}

}  // namespace multiring::tcp
