#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "transport/tcp/handshake/address.h"
#include "transport/tcp/handshake/handshake_messages.h"
#include "transport/tcp/poller.h"
#include "transport/tcp/tcp_options.h"

namespace multiring::tcp {

/// Incoming connections that were closed before the end of their handshake, by reason.
struct RejectedCounts {
  std::uint64_t malformed = 0;        ///< sent something other than a client hello, or closed the connection
  std::uint64_t unauthenticated = 0;  ///< did not know the secret
  std::uint64_t timed_out = 0;
  std::uint64_t evicted = 0;  ///< the oldest one when there were too many
  std::uint64_t total() const { return malformed + unauthenticated + timed_out + evicted; }
};

/// A connection that this rank opens.
struct ConnectAttempt {
  ConnectionInfo info;
  InterfaceAddress from;
  InterfaceAddress to;

  enum class State : std::uint8_t { kBackoff, kConnecting, kHandshake, kDone, kFailed };
  State state = State::kBackoff;
  int tries = 0;
  Clock::time_point retry_at = {};  ///< kBackoff
  // Why it failed: one of these.
  int error = 0;
  Verdict verdict = Verdict::kAccepted;
  bool unauthenticated = false;  ///< what answered is not part of the job
};

/// Accepts and opens connections, and hands over those whose peer has proven that it belongs to the job.
/// Unauthenticated peers, which cost a descriptor each, are limited in number and time.
class Acceptor {
 public:
  static constexpr std::size_t kReservedHandshakes = 8;

  class Delegate {
   public:
    /// Whether to accept a connection from an authenticated client.
    virtual Verdict check(const ConnectionInfo& info) = 0;
    /// A handshake is done. `outgoing`: this rank opened the connection.
    virtual void on_connected(const ConnectionInfo& info, Descriptor socket, bool outgoing) = 0;

   protected:
    ~Delegate() = default;
  };

  /// `options` have to outlive it.
  Acceptor(DescriptorTable& descriptors, Poller& poller, const TcpOptions& options, Delegate& delegate);
  ~Acceptor();

  /// Sets the ports of `addresses`. Removes those that cannot be listened on, as long as one is left.
  void listen(std::vector<InterfaceAddress>& addresses);
  void stop_listening();

  /// Tries until the attempt is done or has failed. It has to stay alive until `cancel`.
  void connect(ConnectAttempt& attempt);
  void cancel(const ConnectAttempt& attempt);

  /// Closes handshakes that take too long, and retries attempts. Cheap if called too often.
  void check_timers();
  const RejectedCounts& rejected() const { return rejected_; }

 private:
  class Listener;
  class Handshake;

  void accept_all(const Listener& listener);
  void start_handshake(UniqueFd socket);
  void start(ConnectAttempt& attempt);
  void remove_closed();

  DescriptorTable& descriptors_;
  Poller& poller_;
  const TcpOptions& options_;
  const HandshakeKey key_;
  Delegate& delegate_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::list<std::unique_ptr<Handshake>> incoming_;  // oldest first
  std::list<std::unique_ptr<Handshake>> outgoing_;
  std::vector<ConnectAttempt*> attempts_;
  RejectedCounts rejected_;
  Clock::time_point next_check_ = {};
};

}  // namespace multiring::tcp
