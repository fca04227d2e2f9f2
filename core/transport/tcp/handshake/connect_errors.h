#pragma once

#include <string>

#include "base/error.h"
#include "base/export.h"
#include "transport/tcp/handshake/acceptor.h"

namespace multiring::tcp {

/// Two ranks that cannot connect.
struct RankPair {
  int rank = -1;
  std::string host;
  int peer = -1;
  std::string peer_host;  ///< empty: not known
  double waited = 0.0;
  int world_rank = rank;  ///< as messages name the two
  int world_peer = peer;
  bool connected_before = false;  ///< see TcpOptions
};

/// "rank 1 on a <what> rank 0 on b<rest>", with both ranks in its context.
Error error_between(ErrorKind kind, const RankPair& ranks, const std::string& what, const std::string& rest);
/// Why an attempt has failed, and what to do.
MULTIRING_API Error attempt_error(const RankPair& ranks, const ConnectAttempt& attempt);
/// Why this rank rejected a client.
Error rejection_error(const RankPair& ranks, Verdict verdict);
/// How far an attempt has got that timed out.
std::string attempt_progress(const ConnectAttempt& attempt);

}  // namespace multiring::tcp
