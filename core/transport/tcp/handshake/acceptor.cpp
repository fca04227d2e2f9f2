#include "transport/tcp/handshake/acceptor.h"

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "transport/tcp/handshake/handshake.h"
#include "transport/tcp/sockets.h"

namespace multiring::tcp {
namespace {

constexpr auto kCheckEvery = std::chrono::milliseconds(10);
// However many connect, this rank has to do something else as well.
constexpr int kMaxAcceptsAtOnce = 64;

}  // namespace

class Acceptor::Listener final : public EventSink {
 public:
  Listener(Acceptor& acceptor, Descriptor socket) : acceptor_(acceptor), socket_(std::move(socket)) {
    acceptor.poller_.add(socket_, *this);
  }
  void on_events(std::uint32_t) override { acceptor_.accept_all(*this); }
  int socket() const { return socket_.get(); }
  void stop() { socket_.reset(); }

 private:
  Acceptor& acceptor_;
  Descriptor socket_;
};

Acceptor::Acceptor(DescriptorTable& descriptors, Poller& poller, const TcpOptions& options,
                   Delegate& delegate)
    : descriptors_(descriptors),
      poller_(poller),
      options_(options),
      key_(derive_handshake_key(options.secret, options.job)),
      delegate_(delegate) {}

Acceptor::~Acceptor() = default;

void Acceptor::listen(std::vector<InterfaceAddress>& addresses) {
  std::string unusable;
  std::erase_if(addresses, [&](InterfaceAddress& address) {
    UniqueFd socket = listen_on(address.address, options_.tcp_congestion);
    if (!socket) {
      unusable += " " + address.interface + " " + address.address.host_text();
      return true;
    }
    listeners_.push_back(std::make_unique<Listener>(*this, descriptors_.adopt(std::move(socket))));
    return false;
  });
  if (addresses.empty())
    throw Error(ErrorKind::kUsage,
                "no address of this host can be listened on:" + unusable +
                    " cannot be assigned: another host may have it, or it is not ready yet");
}

void Acceptor::stop_listening() {
  for (const auto& listener : listeners_) listener->stop();
  for (const auto& handshake : incoming_) handshake->close();
}

void Acceptor::accept_all(const Listener& listener) {
  for (int accepted = 0; listener.socket() >= 0 && accepted < kMaxAcceptsAtOnce; ++accepted) {
    UniqueFd socket = accept_connection(listener.socket());
    if (socket) {
      start_handshake(std::move(socket));
    } else if (errno == EMFILE || errno == ENFILE) {
      // The oldest unauthenticated connection makes room.
      for (auto& handshake : incoming_) {
        if (handshake->closed()) continue;
        handshake->close();
        ++rejected_.evicted;
        break;
      }
      return;
    } else if (errno != EINTR && errno != ECONNABORTED && errno != EPROTO) {
      return;
    }
  }
}

void Acceptor::start_handshake(UniqueFd socket) {
  std::size_t open = 0;
  for (const auto& handshake : incoming_) open += handshake->closed() ? 0 : 1;
  const std::size_t reserved = std::min(kReservedHandshakes, options_.max_handshakes);
  const auto full = [&] { return open >= reserved && *options_.open_handshakes >= options_.max_handshakes; };
  for (auto oldest = incoming_.begin(); full(); ++oldest) {
    if ((*oldest)->closed()) continue;
    (*oldest)->close();
    ++rejected_.evicted;
    --open;
  }
  incoming_.push_back(std::make_unique<Handshake>(*this, descriptors_.adopt(std::move(socket))));
  incoming_.back()->start();
}

void Acceptor::connect(ConnectAttempt& attempt) {
  attempts_.push_back(&attempt);
  start(attempt);
}

void Acceptor::start(ConnectAttempt& attempt) {
  ++attempt.tries;
  UniqueFd socket = start_connect(attempt.from.address, attempt.to.address, options_.tcp_congestion);
  if (!socket) {
    attempt.error = errno;
    attempt.state = ConnectAttempt::State::kFailed;
    return;
  }
  attempt.error = 0;
  attempt.state = ConnectAttempt::State::kConnecting;
  outgoing_.push_back(std::make_unique<Handshake>(*this, descriptors_.adopt(std::move(socket)), attempt));
  outgoing_.back()->start();
}

void Acceptor::cancel(const ConnectAttempt& attempt) {
  for (const auto& handshake : outgoing_)
    if (handshake->is_of(attempt) && !handshake->closed()) handshake->close();
  std::erase(attempts_, &attempt);
}

void Acceptor::check_timers() {
  const Clock::time_point now = Clock::now();
  if (now < next_check_) return;
  next_check_ = now + kCheckEvery;
  for (const auto& handshake : incoming_) {
    if (handshake->closed() || !handshake->timed_out(now)) continue;
    handshake->close();
    ++rejected_.timed_out;
  }
  remove_closed();
  // An event announces new connections once, and not all of them may have been accepted.
  for (const auto& listener : listeners_) accept_all(*listener);
  for (ConnectAttempt* attempt : attempts_)
    if (attempt->state == ConnectAttempt::State::kBackoff && now >= attempt->retry_at) start(*attempt);
}

// Not while events are dispatched: they point to the objects.
void Acceptor::remove_closed() {
  const auto closed = [](const std::unique_ptr<Handshake>& handshake) { return handshake->closed(); };
  incoming_.remove_if(closed);
  outgoing_.remove_if(closed);
}

}  // namespace multiring::tcp
