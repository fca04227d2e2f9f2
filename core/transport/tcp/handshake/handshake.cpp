#include "transport/tcp/handshake/handshake.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "transport/tcp/sockets.h"

namespace multiring::tcp {
namespace {

static_assert(kClientHelloBytes >= kChallengeBytes && kClientHelloBytes >= kServerHelloBytes);

// A server with too many open handshakes, or one that has just died, closes the connection in the middle of
// the handshake. The attempt is repeated; the port of a dead one then refuses it.
constexpr auto kFirstBackoff = std::chrono::milliseconds(10);
constexpr int kMaxBackoffShift = 6;

}  // namespace

Acceptor::Handshake::Handshake(Acceptor& acceptor, Descriptor socket)
    : acceptor_(acceptor),
      socket_(std::move(socket)),
      stage_(Stage::kClientHello),
      time_limit_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(acceptor.options_.handshake_seconds))),
      server_nonce_(random_nonce()) {
  ++*acceptor.options_.open_handshakes;
  counted_.reset(acceptor.options_.open_handshakes.get());
}

Acceptor::Handshake::Handshake(Acceptor& acceptor, Descriptor socket, ConnectAttempt& attempt)
    : acceptor_(acceptor),
      socket_(std::move(socket)),
      attempt_(&attempt),
      stage_(Stage::kConnecting),
      client_nonce_(random_nonce()) {}

void Acceptor::Handshake::start() {
  if (attempt_ == nullptr && !send_all(encode_challenge(server_nonce_)))
    return reject(&RejectedCounts::malformed);
  if (acceptor_.poller_.try_add(socket_, *this)) return;
  if (attempt_ == nullptr) return reject(&RejectedCounts::evicted);
  attempt_->error = errno;
  fail();
}

void Acceptor::Handshake::on_events(std::uint32_t events) {
  if (stage_ == Stage::kConnecting && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0) check_connected();
  if (stage_ != Stage::kClosed && stage_ != Stage::kConnecting) receive();
}

void Acceptor::Handshake::check_connected() {
  const int error = pending_error(socket_.get());
  // A host that does not answer may still be starting.
  if (error == ETIMEDOUT) return interrupted(error);
  if (error != 0) {
    attempt_->error = error;
    return fail();
  }
  // The server may take its time, but its host has to answer.
  set_heartbeat(socket_.get(), acceptor_.options_.heartbeat, acceptor_.options_.heartbeat, true);
  attempt_->state = ConnectAttempt::State::kHandshake;
  stage_ = Stage::kChallenge;
}

std::size_t Acceptor::Handshake::expected_bytes() const {
  switch (stage_) {
    case Stage::kChallenge:
      return kChallengeBytes;
    case Stage::kClientHello:
      return kClientHelloBytes;
    case Stage::kServerHello:
      return kServerHelloBytes;
    case Stage::kConnecting:
    case Stage::kClosed:
      break;
  }
  return 0;
}

// Never reads more than the awaited message: what follows belongs to the connection.
void Acceptor::Handshake::receive() {
  while (input_bytes_ < expected_bytes()) {
    const ssize_t got =
        ::recv(socket_.get(), input_.data() + input_bytes_, expected_bytes() - input_bytes_, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) return interrupted(got < 0 ? errno : 0);
    input_bytes_ += static_cast<std::size_t>(got);
    if (stage_ == Stage::kClientHello && !is_client_hello_prefix(std::span(input_).first(input_bytes_)))
      return reject(&RejectedCounts::malformed);
    if (input_bytes_ == expected_bytes()) received();
  }
}

void Acceptor::Handshake::received() {
  const Stage stage = stage_;
  if (stage == Stage::kChallenge) received_challenge();
  if (stage == Stage::kClientHello) received_client_hello();
  if (stage == Stage::kServerHello) received_server_hello();
}

void Acceptor::Handshake::received_challenge() {
  const auto nonce = parse_challenge(std::span(input_).first(kChallengeBytes));
  if (!nonce) {
    attempt_->unauthenticated = true;
    return fail();
  }
  server_nonce_ = *nonce;
  input_bytes_ = 0;
  stage_ = Stage::kServerHello;
  if (!send_all(encode_client_hello(acceptor_.key_, server_nonce_, client_nonce_, attempt_->info)))
    interrupted(0);
}

void Acceptor::Handshake::received_client_hello() {
  const HandshakeKey& key = acceptor_.key_;
  const auto hello = parse_client_hello(key, server_nonce_, input_);
  if (!hello) return reject(&RejectedCounts::malformed);
  if (!hello->authenticated) {
    // Tells a rank with another secret why, without a proof: it would try until its deadline.
    ServerHelloBytes answer =
        encode_server_hello(key, server_nonce_, client_nonce_, {}, Verdict::kOtherSecret);
    std::fill(answer.end() - 32, answer.end(), std::byte{0});
    send_all(answer);
    return reject(&RejectedCounts::unauthenticated);
  }
  const Verdict verdict = acceptor_.delegate_.check(hello->info);
  const bool sent =
      send_all(encode_server_hello(key, server_nonce_, hello->client_nonce, hello->info, verdict));
  if (sent && verdict == Verdict::kAccepted) return finish(hello->info);
  close();
}

void Acceptor::Handshake::received_server_hello() {
  const auto hello = parse_server_hello(acceptor_.key_, server_nonce_, client_nonce_, attempt_->info,
                                        std::span(input_).first(kServerHelloBytes));
  if (hello && hello->authenticated && hello->verdict == Verdict::kAccepted) {
    attempt_->state = ConnectAttempt::State::kDone;
    return finish(attempt_->info);
  }
  // The connection that the server opens is taken.
  if (hello && hello->authenticated && hello->verdict == Verdict::kSimultaneous) return interrupted(0);
  if (hello && (hello->authenticated || hello->verdict == Verdict::kOtherSecret))
    attempt_->verdict = hello->verdict;
  else
    attempt_->unauthenticated = true;
  fail();
}

void Acceptor::Handshake::finish(const ConnectionInfo& info) {
  stage_ = Stage::kClosed;
  counted_.reset();
  acceptor_.delegate_.on_connected(info, std::move(socket_), attempt_ != nullptr);
}

bool Acceptor::Handshake::send_all(std::span<const std::byte> bytes) {
  // The first few bytes of a connection always fit into its buffer, or nearly: otherwise the client retries.
  return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(bytes.size());
}

void Acceptor::Handshake::interrupted(int error) {
  if (attempt_ == nullptr) return reject(&RejectedCounts::malformed);
  attempt_->error = error;
  attempt_->state = ConnectAttempt::State::kBackoff;
  attempt_->retry_at = Clock::now() + kFirstBackoff * (1 << std::min(attempt_->tries, kMaxBackoffShift));
  close();
}

void Acceptor::Handshake::reject(std::uint64_t RejectedCounts::* reason) {
  ++(acceptor_.rejected_.*reason);
  close();
}

void Acceptor::Handshake::fail() {
  attempt_->state = ConnectAttempt::State::kFailed;
  close();
}

void Acceptor::Handshake::close() {
  stage_ = Stage::kClosed;
  counted_.reset();
  acceptor_.poller_.remove(socket_);
  socket_.reset();
}

}  // namespace multiring::tcp
