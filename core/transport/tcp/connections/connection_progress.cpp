// A file of its own: the kernel's header has more fields than the C library's, and the two conflict.

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "transport/tcp/connections/connection_balance.h"

namespace multiring::tcp {

ConnectionProgress progress_of(int socket) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
  return {info.tcpi_bytes_acked, static_cast<double>(info.tcpi_busy_time) / 1e6};
}

}  // namespace multiring::tcp
