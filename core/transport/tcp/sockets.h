#pragma once

#include <cstdint>
#include <string>

#include "base/unique_fd.h"
#include "transport/tcp/handshake/address.h"

namespace multiring::tcp {

// What is asked of the kernel's sockets. All of them do not block.

/// Listens on `address`; its port is set to the one that the kernel chose, if it is 0. None if the address
/// cannot be used: one of IPv6 is there for a second before it can, or for good if another host has it.
UniqueFd listen_on(SocketAddress& address);
/// Takes the next caller; none, with errno set, if there is none or it cannot be taken.
UniqueFd accept_from(int listener);
/// Begins to call `to` from the interface of `from`; none, with errno set, if that fails at once.
UniqueFd begin_call(const SocketAddress& from, const SocketAddress& to);
/// The error that a call ended with; 0: it is answered.
int call_error(int socket);

/// The address at the other end, for messages; empty if it is not known any more.
std::string remote_host(int socket);
/// The same for connections that go from the same address to the same address.
std::string path_of(int socket);

/// Sends what is written at once instead of waiting for more.
void set_no_delay(int socket);
/// Has the kernels at both ends ask each other for a sign of life after a fifth of `seconds` of silence, and
/// end the connection after `patience` seconds without any. `unanswered_too`: also when something is on its
/// way, for connections that carry little; others would take a peer that is slow to read for a dead one.
void set_heartbeat(int socket, double seconds, double patience, bool unanswered_too);

/// What the peer's kernel owes an answer for.
struct Unanswered {
  bool anything = false;      ///< something was sent after its last answer
  double since_answer = 0.0;  ///< seconds since its last answer
  double since_heard = 0.0;   ///< seconds since anything came from it
};
Unanswered unanswered(int socket);

}  // namespace multiring::tcp
