#include "transport/tcp/handshake/acceptor.h"

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "transport/tcp/handshake/handshake.h"
#include "transport/tcp/sockets.h"

namespace multiring::tcp {
namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(10);
// Callers taken at a time: however many strangers there are, this rank does something else as well.
constexpr int kAcceptedAtOnce = 64;

}  // namespace

class Doorkeeper::Listener final : public EventSink {
 public:
  Listener(Doorkeeper& door, Descriptor socket) : door_(door), socket_(std::move(socket)) {
    door.poller_.add(socket_, *this);
  }
  void on_events(std::uint32_t) override { door_.accept_all(*this); }
  int socket() const { return socket_.get(); }
  void stop() { socket_.reset(); }

 private:
  Doorkeeper& door_;
  Descriptor socket_;
};

Doorkeeper::Doorkeeper(DescriptorTable& descriptors, Poller& poller, const Options& options,
                       Resident& resident)
    : descriptors_(descriptors), poller_(poller), options_(options), resident_(resident) {}

Doorkeeper::~Doorkeeper() = default;

void Doorkeeper::listen(std::vector<InterfaceAddress>& addresses) {
  std::string unusable;
  std::erase_if(addresses, [&](InterfaceAddress& address) {
    UniqueFd socket = listen_on(address.address);
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

void Doorkeeper::stop_listening() {
  for (const auto& listener : listeners_) listener->stop();
  for (const auto& stranger : strangers_inside_) stranger->hang_up();
}

void Doorkeeper::accept_all(const Listener& listener) {
  for (int taken = 0; listener.socket() >= 0 && taken < kAcceptedAtOnce; ++taken) {
    UniqueFd socket = accept_from(listener.socket());
    if (socket) {
      admit(std::move(socket));
    } else if (errno == EMFILE || errno == ENFILE) {
      // Who takes a descriptor and gives nothing for it goes first.
      for (auto& stranger : strangers_inside_) {
        if (stranger->over()) continue;
        stranger->hang_up();
        ++strangers_.crowded;
        break;
      }
      return;
    } else if (errno != EINTR && errno != ECONNABORTED && errno != EPROTO) {
      return;
    }
  }
}

void Doorkeeper::admit(UniqueFd socket) {
  std::size_t inside = 0;
  for (const auto& stranger : strangers_inside_) inside += stranger->over() ? 0 : 1;
  const std::size_t reserved = std::min(kReservedHandshakes, options_.max_strangers);
  const auto crowded = [&] {
    return inside >= reserved && *options_.open_handshakes >= options_.max_strangers;
  };
  for (auto oldest = strangers_inside_.begin(); crowded(); ++oldest) {
    if ((*oldest)->over()) continue;
    (*oldest)->hang_up();
    ++strangers_.crowded;
    --inside;
  }
  strangers_inside_.push_back(std::make_unique<Encounter>(*this, descriptors_.adopt(std::move(socket))));
  strangers_inside_.back()->begin();
}

void Doorkeeper::call(Call& call) {
  calls_.push_back(&call);
  begin(call);
}

void Doorkeeper::begin(Call& call) {
  ++call.attempts;
  UniqueFd socket = begin_call(call.from.address, call.to.address);
  if (!socket) {
    call.error = errno;
    call.state = Call::State::kFailed;
    return;
  }
  call.error = 0;
  call.state = Call::State::kCalling;
  outgoing_.push_back(std::make_unique<Encounter>(*this, descriptors_.adopt(std::move(socket)), call));
  outgoing_.back()->begin();
}

void Doorkeeper::forget(const Call& call) {
  for (const auto& encounter : outgoing_)
    if (encounter->makes(call) && !encounter->over()) encounter->hang_up();
  std::erase(calls_, &call);
}

void Doorkeeper::look_at_clock() {
  const Clock::time_point now = Clock::now();
  if (now < next_look_) return;
  next_look_ = now + kLookEvery;
  for (const auto& stranger : strangers_inside_) {
    if (stranger->over() || !stranger->late(now)) continue;
    stranger->hang_up();
    ++strangers_.late;
  }
  sweep();
  // Events tell of callers once, and not all may have been taken.
  for (const auto& listener : listeners_) accept_all(*listener);
  for (Call* call : calls_)
    if (call->state == Call::State::kPause && now >= call->again) begin(*call);
}

// Not while events are told: they name the objects.
void Doorkeeper::sweep() {
  const auto over = [](const std::unique_ptr<Encounter>& encounter) { return encounter->over(); };
  strangers_inside_.remove_if(over);
  outgoing_.remove_if(over);
}

}  // namespace multiring::tcp
