#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "base/text.h"
#include "base/unique_fd.h"
#include "transport/tcp/handshake/handshake_messages.h"
#include "transport/tcp/tcp_network.h"

namespace multiring::testing {

/// A blocking connection to a network's port that sends whatever a test wants.
class RawPeer {
 public:
  explicit RawPeer(const TcpNetwork& network);
  explicit RawPeer(UniqueFd socket) : socket_(std::move(socket)) {}

  void say(std::span<const std::byte> bytes);
  void say(std::string_view text) { say(bytes_of(text)); }
  /// Reads so many bytes; false if the other end hangs up before.
  bool hear(std::span<std::byte> bytes);
  /// Whether the other end hangs up, whatever it says before; waits for it.
  bool is_hung_up();
  void hang_up() { socket_.reset(); }
  /// The same without a goodbye of the kernel.
  void reset();
  /// From now on nothing arrives, as if the way here were broken: the kernel does not answer either.
  void cut_off();

  /// A correct handshake; true if it is accepted.
  bool introduce(const TcpOptions& options, const tcp::ConnectionInfo& facts);

 private:
  UniqueFd socket_;
};

/// What rank 1 of 2 says of its connections to rank 0.
tcp::ConnectionInfo facts_of_rank_1(const TcpOptions& options, int channel, int stripe = 0, int stripes = 1);

/// A listening socket in place of a rank's.
class RawListener {
 public:
  RawListener();
  /// As a rank's entry in the store.
  std::string endpoint() const;
  RawPeer accept();
  /// None comes within so many seconds: false, and `peer` stays as it is.
  bool accept_within(double seconds, RawPeer& peer);

 private:
  UniqueFd socket_;
  int port_ = 0;
};

}  // namespace multiring::testing
