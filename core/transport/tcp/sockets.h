#pragma once

#include <cstdint>
#include <string>

#include "base/unique_fd.h"
#include "transport/tcp/handshake/address.h"

namespace multiring::tcp {

// Operations on sockets, all of which are non-blocking.

// `congestion`: the kernel's name of the congestion control of a connection (cubic, reno, dctcp, bbr, ...).
// Empty: that of the host; but where it is BBR, which sends at a pace of its own, cubic, or reno if the user
// may not choose that. A usage error says that the kernel has or allows none of that name.

/// Listens on `address`; port 0 is replaced by the port that the kernel chose. None if the address cannot be
/// used: an IPv6 address that is new (for a second), or that another host has.
UniqueFd listen_on(SocketAddress& address, const std::string& congestion);
/// None, with errno set, if there is no connection or it cannot be accepted.
UniqueFd accept_connection(int listener);
/// Starts to connect to `to` from the interface of `from`; none, with errno set, if that fails at once.
UniqueFd start_connect(const SocketAddress& from, const SocketAddress& to, const std::string& congestion);
/// The error that a connect ended with; 0: it is connected.
int pending_error(int socket);

/// The address at the other end, for messages; empty if it is no longer known.
std::string remote_host(int socket);
/// Equal for connections between the same two addresses.
std::string path_of(int socket);

/// Sends what is written at once instead of waiting for more.
void set_no_delay(int socket);
/// Has the kernel probe the peer after a fifth of `seconds` without traffic, and end the connection after
/// `limit` seconds without an answer. `unanswered_too`: also while sent data is not acknowledged; only for
/// connections that carry little, since elsewhere the peer may just be slow to read.
void set_heartbeat(int socket, double seconds, double limit, bool unanswered_too);

/// Whether the peer's kernel owes an acknowledgement.
struct Unanswered {
  bool anything = false;      ///< something was sent after its last acknowledgement
  double since_answer = 0.0;  ///< seconds since its last acknowledgement
  double since_heard = 0.0;   ///< seconds since anything came from it
};
Unanswered unanswered(int socket);

}  // namespace multiring::tcp
