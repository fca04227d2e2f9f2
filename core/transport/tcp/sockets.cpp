#include "transport/tcp/sockets.h"

#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <string>
#include <string_view>

#include "base/error.h"

namespace multiring::tcp {
namespace {

// Large enough that unauthenticated peers do not fill it. The kernel cuts it to net.core.somaxconn.
constexpr int kBacklog = 4096;
// The kernel's limit for TCP_KEEPCNT.
constexpr int kMaxProbes = 127;

UniqueFd new_socket(int family) {
  return UniqueFd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

void set_option(int socket, int level, int name, int value) {
  if (::setsockopt(socket, level, name, &value, sizeof value) != 0) throw_errno("setsockopt");
}

/// Accepted sockets have that of the one that listens.
void choose_congestion_control(int socket, const std::string& wanted) {
  const auto take = [&](std::string_view name) {
    return ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                        static_cast<socklen_t>(name.size())) == 0;
  };
  if (!wanted.empty()) {
    if (take(wanted)) return;
    throw Error(ErrorKind::kUsage,
                "MULTIRING_TCP_CONGESTION is '" + wanted +
                    "', which the kernel of this host does not have, or does not let this user choose: "
                    "/proc/sys/net/ipv4/tcp_allowed_congestion_control lists what it does");
  }
  std::array<char, 16> current{};  // TCP_CA_NAME_MAX
  socklen_t length = current.size();
  if (::getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, current.data(), &length) != 0) return;
  // BBR sends at the pace at which it has seen a connection deliver, by timers that are late where ranks keep
  // the processors busy, and sees bursts of a collective for what the path can do.
  if (std::string_view(current.data()) == "bbr" && !take("cubic")) take("reno");
}

}  // namespace

UniqueFd listen_on(SocketAddress& address, const std::string& congestion) {
  UniqueFd socket = new_socket(address.family());
  if (!socket) throw_errno("socket");
  choose_congestion_control(socket.get(), congestion);
  if (address.is_ipv6()) set_option(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
  if (::bind(socket.get(), address.data(), address.length()) != 0) {
    if (errno == EADDRNOTAVAIL) return UniqueFd();
    throw_errno("bind " + address.text());
  }
  if (::listen(socket.get(), kBacklog) != 0) throw_errno("listen " + address.text());
  sockaddr_in6 bound{};
  socklen_t length = sizeof bound;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0)
    throw_errno("getsockname");
  address = *SocketAddress::from(reinterpret_cast<const sockaddr*>(&bound));
  return socket;
}

UniqueFd accept_connection(int listener) {
  return UniqueFd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

UniqueFd start_connect(const SocketAddress& from, const SocketAddress& to, const std::string& congestion) {
  UniqueFd socket = new_socket(to.family());
  if (!socket) return socket;
  choose_congestion_control(socket.get(), congestion);
  // Connections to different ends can share a port. Kernels without this option have fewer ports.
  const int yes = 1;
  ::setsockopt(socket.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &yes, sizeof yes);
  SocketAddress any_port = from;
  any_port.set_port(0);
  if (::bind(socket.get(), any_port.data(), any_port.length()) != 0) return UniqueFd();
  if (::connect(socket.get(), to.data(), to.length()) != 0 && errno != EINPROGRESS) {
    const int error = errno;
    socket.reset();
    errno = error;
  }
  return socket;
}

int pending_error(int socket) {
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

std::string remote_host(int socket) {
  sockaddr_in6 remote{};
  socklen_t length = sizeof remote;
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&remote), &length) != 0) return "";
  const auto address = SocketAddress::from(reinterpret_cast<const sockaddr*>(&remote));
  return address ? address->host_text() : "";
}

std::string path_of(int socket) {
  sockaddr_in6 own{};
  socklen_t length = sizeof own;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &length) != 0) return "";
  const auto address = SocketAddress::from(reinterpret_cast<const sockaddr*>(&own));
  return (address ? address->host_text() : "") + " to " + remote_host(socket);
}

void set_no_delay(int socket) { set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1); }

void set_heartbeat(int socket, double seconds, double limit, bool unanswered_too) {
  // Probes follow each other as quickly as the kernel counts, in seconds, and as many of them as it sends.
  const int idle = std::max(1, static_cast<int>(seconds / 5));
  const int rest = std::max(1, static_cast<int>(std::ceil(limit)) - idle);
  const int interval = (rest + kMaxProbes - 1) / kMaxProbes;
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, idle);
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, interval);
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, (rest + interval - 1) / interval);
  // 0: the kernel's own limit.
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, unanswered_too ? static_cast<int>(limit * 1000) : 0);
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
}

Unanswered unanswered(int socket) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
  // The kernel probes a peer whose buffer is full at longer and longer intervals. What counts is whether it
  // has probed since the last acknowledgement, not how long ago that was.
  const bool sent = info.tcpi_unacked > 0 && info.tcpi_last_data_sent < info.tcpi_last_ack_recv;
  return {sent || info.tcpi_probes > 0, info.tcpi_last_ack_recv / 1000.0,
          std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv) / 1000.0};
}

}  // namespace multiring::tcp
