#include "transport/tcp/connections/connection.h"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

#include "transport/tcp/sockets.h"

namespace multiring::tcp {

void TcpConnection::on_events(std::uint32_t events) {
  if (!open()) return;
  // A read or write finds the error, after the data that came before it.
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) readable_ = true;
  if ((events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0) writable_ = true;
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) ending_ = true;
  if (can_advance()) observer_.on_ready(*this);
}

std::size_t TcpConnection::receive(std::byte* to, std::size_t bytes) {
  ssize_t got = -1;
  do got = ::recv(socket_.get(), to, bytes, 0);
  while (got < 0 && errno == EINTR);
  if (got <= 0) {
    readable_ = false;
    if (got == 0) fail(0);
    if (got < 0 && errno != EAGAIN) fail(errno);
    return 0;
  }
  // Less than there was room for: the kernel reports the next bytes. It does not report the end again.
  if (static_cast<std::size_t>(got) < bytes && !ending_) readable_ = false;
  return static_cast<std::size_t>(got);
}

std::size_t TcpConnection::send(const iovec* pieces, std::size_t count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces);
  message.msg_iovlen = count;
  ssize_t put = -1;
  do put = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
  while (put < 0 && errno == EINTR);
  if (put >= 0) return static_cast<std::size_t>(put);
  writable_ = false;
  // What the peer sent before it closed the connection is read first; that finds the end, too.
  if (errno != EAGAIN && errno != EPIPE && errno != ECONNRESET) fail(errno);
  return 0;
}

void TcpConnection::fail(int error) {
  socket_.reset();
  observer_.on_closed(*this, error);
}

void TcpConnection::end_output() {
  if (open()) ::shutdown(socket_.get(), SHUT_WR);
}

// The kernel discards what the peer has not received if the socket is closed with unread input in it.
bool TcpConnection::delivered() {
  std::array<std::byte, 16 * 1024> unread;
  if (!open()) return true;
  ssize_t got = 1;
  for (int times = 0; got > 0 && times < 256; ++times)
    got = ::recv(socket_.get(), unread.data(), unread.size(), 0);
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return true;
  return unacknowledged() <= 1;  // the end counts as one byte
}

std::size_t TcpConnection::unacknowledged() const {
  int bytes = 0;
  return open() && ::ioctl(socket_.get(), SIOCOUTQ, &bytes) == 0 ? static_cast<std::size_t>(bytes) : 0;
}

TcpConnection::Silence TcpConnection::silence(Clock::time_point now) {
  const Unanswered state = unanswered(socket_.get());
  if (!state.anything) {
    unanswered_since_.reset();
    return {0.0, state.since_answer, state.since_heard};
  }
  // An acknowledgement in between was for earlier data.
  if (!unanswered_since_ || state.since_answer < seconds_between(*unanswered_since_, now))
    unanswered_since_ = now;
  return {seconds_between(*unanswered_since_, now), state.since_answer, state.since_heard};
}

void TcpConnection::expire() { fail(ETIMEDOUT); }

}  // namespace multiring::tcp
