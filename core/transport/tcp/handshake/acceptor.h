#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "transport/tcp/handshake/address.h"
#include "transport/tcp/handshake/handshake_messages.h"
#include "transport/tcp/poller.h"

namespace multiring::tcp {

/// Connections that came to nothing, by reason.
struct StrangerCounts {
  std::uint64_t garbage = 0;   ///< sent something that is no hello, or hung up
  std::uint64_t unproven = 0;  ///< did not know the secret
  std::uint64_t late = 0;      ///< took too long
  std::uint64_t crowded = 0;   ///< the oldest of too many
  std::uint64_t total() const { return garbage + unproven + late + crowded; }
};

/// How many connections that others have opened are in their handshake. The networks of a job share one, for
/// a process has many of them and one limit on its descriptors.
using OpenHandshakes = std::atomic<std::size_t>;

/// A connection that this rank makes.
struct Call {
  HelloFacts facts;
  InterfaceAddress from;
  InterfaceAddress to;

  enum class State : std::uint8_t { kPause, kCalling, kAnswered, kDone, kFailed };
  State state = State::kPause;
  int attempts = 0;
  Clock::time_point again = {};  ///< kPause: when it is tried
  // Why it failed: one of these, or whoever answered is no rank of the job.
  int error = 0;
  Verdict verdict = Verdict::kWelcome;
  bool stranger = false;
};

/// Listens and calls, and lets in who proves to belong to the job. A stranger costs it a descriptor and a few
/// hundred bytes for a limited time, and there are only so many of them at once.
class Doorkeeper {
 public:
  struct Options {
    HandshakeKey key = {};
    double handshake_seconds = 10.0;
    double heartbeat = 5.0;
    /// Handshakes at a time, of all that count in `open_handshakes`; then the oldest of this network is given
    /// up. A network may always have kReservedHandshakes: a flood at the port of another one does not shut
    /// its own.
    std::size_t max_strangers = 128;
    std::shared_ptr<OpenHandshakes> open_handshakes = std::make_shared<OpenHandshakes>(0);
  };
  static constexpr std::size_t kReservedHandshakes = 8;
  /// Who lives behind the door.
  class Resident {
   public:
    /// Whether a caller that has proven what it says of itself is welcome.
    virtual Verdict judge(const HelloFacts& facts) = 0;
    /// A connection stands; `called` by this rank.
    virtual void enter(const HelloFacts& facts, Descriptor socket, bool called) = 0;

   protected:
    ~Resident() = default;
  };

  Doorkeeper(DescriptorTable& descriptors, Poller& poller, const Options& options, Resident& resident);
  ~Doorkeeper();

  /// Sets the ports of `addresses`, and takes out what cannot be used while others can.
  void listen(std::vector<InterfaceAddress>& addresses);
  void stop_listening();

  /// Calls until it is answered or fails. The call stays with the caller until `forget`.
  void call(Call& call);
  void forget(const Call& call);

  /// What time brings: late strangers, calls to be tried again. Cheap if called too often.
  void look_at_clock();
  const StrangerCounts& strangers() const { return strangers_; }

 private:
  class Listener;
  class Encounter;

  void accept_all(const Listener& listener);
  void admit(UniqueFd socket);
  void begin(Call& call);
  void sweep();

  DescriptorTable& descriptors_;
  Poller& poller_;
  Options options_;
  Resident& resident_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::list<std::unique_ptr<Encounter>> strangers_inside_;  // oldest first
  std::list<std::unique_ptr<Encounter>> outgoing_;
  std::vector<Call*> calls_;
  StrangerCounts strangers_;
  Clock::time_point next_look_ = {};
};

}  // namespace multiring::tcp
