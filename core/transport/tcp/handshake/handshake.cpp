#include "transport/tcp/handshake/handshake.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "transport/tcp/sockets.h"

namespace multiring::tcp {
namespace {

static_assert(kHelloBytes >= kChallengeBytes && kHelloBytes >= kWelcomeBytes);

// A listener that had too many strangers, or has just died, hangs up in the middle of a handshake: the call
// is repeated, and a dead one will then refuse it.
constexpr auto kFirstPause = std::chrono::milliseconds(10);
constexpr int kLongestPauseShift = 6;

}  // namespace

Doorkeeper::Encounter::Encounter(Doorkeeper& door, Descriptor socket)
    : door_(door),
      socket_(std::move(socket)),
      stage_(Stage::kHello),
      until_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                std::chrono::duration<double>(door.options_.handshake_seconds))),
      listener_nonce_(random_nonce()) {
  ++*door.options_.open_handshakes;
  counted_.reset(door.options_.open_handshakes.get());
}

Doorkeeper::Encounter::Encounter(Doorkeeper& door, Descriptor socket, Call& call)
    : door_(door),
      socket_(std::move(socket)),
      call_(&call),
      stage_(Stage::kCalling),
      caller_nonce_(random_nonce()) {}

void Doorkeeper::Encounter::begin() {
  if (call_ == nullptr && !send_all(encode_challenge(listener_nonce_))) return drop(&StrangerCounts::garbage);
  if (door_.poller_.try_add(socket_, *this)) return;
  if (call_ == nullptr) return drop(&StrangerCounts::crowded);
  call_->error = errno;
  fail_for_good();
}

void Doorkeeper::Encounter::on_events(std::uint32_t events) {
  if (stage_ == Stage::kCalling && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0) called();
  if (stage_ != Stage::kOver && stage_ != Stage::kCalling) receive();
}

void Doorkeeper::Encounter::called() {
  const int error = call_error(socket_.get());
  // A host that does not answer may still be starting.
  if (error == ETIMEDOUT) return broken_off(error);
  if (error != 0) {
    call_->error = error;
    return fail_for_good();
  }
  // The listener may take its time, but its host has to be there.
  set_heartbeat(socket_.get(), door_.options_.heartbeat, door_.options_.heartbeat, true);
  call_->state = Call::State::kAnswered;
  stage_ = Stage::kChallenge;
}

std::size_t Doorkeeper::Encounter::expected() const {
  switch (stage_) {
    case Stage::kChallenge:
      return kChallengeBytes;
    case Stage::kHello:
      return kHelloBytes;
    case Stage::kWelcome:
      return kWelcomeBytes;
    case Stage::kCalling:
    case Stage::kOver:
      break;
  }
  return 0;
}

// Never more than the message that is due: what follows it belongs to who takes the connection over.
void Doorkeeper::Encounter::receive() {
  while (input_bytes_ < expected()) {
    const ssize_t got = ::recv(socket_.get(), input_.data() + input_bytes_, expected() - input_bytes_, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) return broken_off(got < 0 ? errno : 0);
    input_bytes_ += static_cast<std::size_t>(got);
    if (stage_ == Stage::kHello && !begins_like_hello(std::span(input_).first(input_bytes_)))
      return drop(&StrangerCounts::garbage);
    if (input_bytes_ == expected()) received();
  }
}

void Doorkeeper::Encounter::received() {
  const Stage stage = stage_;
  if (stage == Stage::kChallenge) received_challenge();
  if (stage == Stage::kHello) received_hello();
  if (stage == Stage::kWelcome) received_welcome();
}

void Doorkeeper::Encounter::received_challenge() {
  const auto nonce = parse_challenge(std::span(input_).first(kChallengeBytes));
  if (!nonce) {
    call_->stranger = true;
    return fail_for_good();
  }
  listener_nonce_ = *nonce;
  input_bytes_ = 0;
  stage_ = Stage::kWelcome;
  if (!send_all(encode_hello(door_.options_.key, listener_nonce_, caller_nonce_, call_->facts)))
    broken_off(0);
}

void Doorkeeper::Encounter::received_hello() {
  const HandshakeKey& key = door_.options_.key;
  const auto hello = parse_hello(key, listener_nonce_, input_);
  if (!hello) return drop(&StrangerCounts::garbage);
  if (!hello->proven) {
    // A rank with another secret is told so, and can say so, instead of trying until its deadline. Nothing is
    // proven by this to whoever reads it.
    WelcomeBytes answer = encode_welcome(key, listener_nonce_, caller_nonce_, {}, Verdict::kOtherSecret);
    std::fill(answer.end() - 32, answer.end(), std::byte{0});
    send_all(answer);
    return drop(&StrangerCounts::unproven);
  }
  const Verdict verdict = door_.resident_.judge(hello->facts);
  const bool sent =
      send_all(encode_welcome(key, listener_nonce_, hello->caller_nonce, hello->facts, verdict));
  if (sent && verdict == Verdict::kWelcome) return enter(hello->facts);
  hang_up();
}

void Doorkeeper::Encounter::received_welcome() {
  const auto welcome = parse_welcome(door_.options_.key, listener_nonce_, caller_nonce_, call_->facts,
                                     std::span(input_).first(kWelcomeBytes));
  if (welcome && welcome->proven && welcome->verdict == Verdict::kWelcome) {
    call_->state = Call::State::kDone;
    return enter(call_->facts);
  }
  // Its own call will come, or has.
  if (welcome && welcome->proven && welcome->verdict == Verdict::kCrossed) return broken_off(0);
  if (welcome && (welcome->proven || welcome->verdict == Verdict::kOtherSecret))
    call_->verdict = welcome->verdict;
  else
    call_->stranger = true;
  fail_for_good();
}

void Doorkeeper::Encounter::enter(const HelloFacts& facts) {
  stage_ = Stage::kOver;
  counted_.reset();
  door_.resident_.enter(facts, std::move(socket_), call_ != nullptr);
}

bool Doorkeeper::Encounter::send_all(std::span<const std::byte> bytes) {
  // Nothing is in the way of the first few bytes of a connection, or nearly: then the other end tries again.
  return ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(bytes.size());
}

void Doorkeeper::Encounter::broken_off(int error) {
  if (call_ == nullptr) return drop(&StrangerCounts::garbage);
  call_->error = error;
  call_->state = Call::State::kPause;
  call_->again = Clock::now() + kFirstPause * (1 << std::min(call_->attempts, kLongestPauseShift));
  hang_up();
}

void Doorkeeper::Encounter::drop(std::uint64_t StrangerCounts::* reason) {
  ++(door_.strangers_.*reason);
  hang_up();
}

void Doorkeeper::Encounter::fail_for_good() {
  call_->state = Call::State::kFailed;
  hang_up();
}

void Doorkeeper::Encounter::hang_up() {
  stage_ = Stage::kOver;
  counted_.reset();
  door_.poller_.remove(socket_);
  socket_.reset();
}

}  // namespace multiring::tcp
