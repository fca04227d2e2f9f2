#pragma once

#include <string>

#include "base/error.h"
#include "transport/tcp/handshake/acceptor.h"

namespace multiring::tcp {

/// Two ranks, one of which cannot get through to the other.
struct TwoEnds {
  int rank = -1;
  std::string host;
  int peer = -1;
  std::string peer_host;  ///< empty: not known
  double waited = 0.0;
  int world_rank = rank;  ///< how messages call the two
  int world_peer = peer;
};

/// Error with both ends in its context and at the beginning of its message: "rank 1 on a <what> rank 0 on
/// b<rest>".
Error error_between(ErrorKind kind, const TwoEnds& ends, const std::string& what, const std::string& rest);
/// Why a call has failed for good, and what to do about it.
Error call_error(const TwoEnds& ends, const Call& call);
/// Why a rank that called was refused.
Error caller_error(const TwoEnds& ends, Verdict verdict);
/// How far a call has got that its deadline ended.
std::string call_progress(const Call& call);

}  // namespace multiring::tcp
