#include "support/network/raw_peer.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>

namespace multiring::testing {

RawPeer::RawPeer(const TcpNetwork& network) {
  const tcp::SocketAddress& to = network.addresses().front().address;
  socket_.reset(::socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(socket_.get(), to.data(), to.length()), 0);
}

void RawPeer::say(std::span<const std::byte> bytes) {
  // The other end may have hung up already, as it should.
  [[maybe_unused]] const ssize_t put = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

bool RawPeer::hear(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
    if (got <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
  return true;
}

bool RawPeer::is_hung_up() {
  timeval limit{20, 0};
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  std::array<std::byte, 256> ignored;
  ssize_t got = 0;
  do got = ::recv(socket_.get(), ignored.data(), ignored.size(), 0);
  while (got > 0);
  return got == 0 || errno == ECONNRESET;
}

void RawPeer::reset() {
  const linger at_once{1, 0};
  EXPECT_EQ(::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once), 0);
  hang_up();
}

void RawPeer::cut_off() {
  sock_filter nothing = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog program = {1, &nothing};
  EXPECT_EQ(::setsockopt(socket_.get(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program), 0);
}

bool RawPeer::introduce(const TcpOptions& options, const tcp::ConnectionInfo& facts) {
  const tcp::HandshakeKey key = tcp::derive_handshake_key(options.secret, options.job);
  tcp::ChallengeBytes challenge;
  if (!hear(challenge)) return false;
  const auto nonce = tcp::parse_challenge(challenge);
  if (!nonce) return false;
  const tcp::Nonce own = tcp::random_nonce();
  say(tcp::encode_client_hello(key, *nonce, own, facts));
  tcp::ServerHelloBytes answer;
  if (!hear(answer)) return false;
  const auto welcome = tcp::parse_server_hello(key, *nonce, own, facts, answer);
  return welcome && welcome->authenticated && welcome->verdict == tcp::Verdict::kAccepted;
}

tcp::ConnectionInfo facts_of_rank_1(const TcpOptions& options, int channel, int stripe, int stripes) {
  return {1, 0, options.size, channel, stripe, stripes, 1, tcp::settings_of(options)};
}

RawListener::RawListener() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* pointer = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(socket_.get(), pointer, length), 0);
  EXPECT_EQ(::listen(socket_.get(), 16), 0);
  EXPECT_EQ(::getsockname(socket_.get(), pointer, &length), 0);
  port_ = ntohs(address.sin_port);
}

std::string RawListener::endpoint() const {
  return "elsewhere\n1\nlo 127.0.0.1 8 " + std::to_string(port_) + " 0";
}

bool RawListener::accept_within(double seconds, RawPeer& peer) {
  pollfd waiting{socket_.get(), POLLIN, 0};
  if (::poll(&waiting, 1, static_cast<int>(seconds * 1000)) != 1) return false;
  peer = accept();
  return true;
}

RawPeer RawListener::accept() {
  return RawPeer(UniqueFd(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC)));
}

}  // namespace multiring::testing
