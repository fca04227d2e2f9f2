#include "transport/tcp/connections/connection.h"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

#include "transport/tcp/sockets.h"

namespace multiring::tcp {

void TcpLink::on_events(std::uint32_t events) {
  if (!open()) return;
  // Errors are read and written like data: what came before them counts.
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) readable_ = true;
  if ((events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0) writable_ = true;
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) ending_ = true;
  if (can_move()) observer_.has_work(*this);
}

std::size_t TcpLink::receive(std::byte* to, std::size_t bytes) {
  ssize_t got = -1;
  do got = ::recv(socket_.get(), to, bytes, 0);
  while (got < 0 && errno == EINTR);
  if (got <= 0) {
    readable_ = false;
    if (got == 0) fail(0);
    if (got < 0 && errno != EAGAIN) fail(errno);
    return 0;
  }
  // Less than there was room for: the next bytes are announced anew. An end that was announced is not.
  if (static_cast<std::size_t>(got) < bytes && !ending_) readable_ = false;
  return static_cast<std::size_t>(got);
}

std::size_t TcpLink::send(const iovec* pieces, std::size_t count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces);
  message.msg_iovlen = count;
  ssize_t put = -1;
  do put = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
  while (put < 0 && errno == EINTR);
  if (put >= 0) return static_cast<std::size_t>(put);
  writable_ = false;
  // What the peer sent before it closed the connection is still to be read, which finds the end as well.
  if (errno != EAGAIN && errno != EPIPE && errno != ECONNRESET) fail(errno);
  return 0;
}

void TcpLink::fail(int error) {
  socket_.reset();
  observer_.closed(*this, error);
}

void TcpLink::end_output() {
  if (open()) ::shutdown(socket_.get(), SHUT_WR);
}

// A socket that is closed with something unread in it, or that still gets something, has the kernel throw
// away what the peer has not got.
bool TcpLink::delivered() {
  std::array<std::byte, 16 * 1024> unread;
  if (!open()) return true;
  ssize_t got = 1;
  for (int times = 0; got > 0 && times < 256; ++times)
    got = ::recv(socket_.get(), unread.data(), unread.size(), 0);
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return true;
  return undelivered() <= 1;  // the end counts as one byte
}

std::size_t TcpLink::undelivered() const {
  int bytes = 0;
  return open() && ::ioctl(socket_.get(), SIOCOUTQ, &bytes) == 0 ? static_cast<std::size_t>(bytes) : 0;
}

TcpLink::Silence TcpLink::silence(Clock::time_point now) {
  const Unanswered owed = unanswered(socket_.get());
  if (!owed.anything) {
    unanswered_since_.reset();
    return {0.0, owed.since_answer, owed.since_heard};
  }
  // An answer in between was one to what was sent then; what is on its way now was sent later.
  if (!unanswered_since_ || owed.since_answer < seconds_between(*unanswered_since_, now))
    unanswered_since_ = now;
  return {seconds_between(*unanswered_since_, now), owed.since_answer, owed.since_heard};
}

void TcpLink::expire() { fail(ETIMEDOUT); }

}  // namespace multiring::tcp
