#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "transport/tcp/handshake/acceptor.h"

namespace multiring::tcp {

/// A connection until its handshake is done.
class Doorkeeper::Encounter final : public EventSink {
 public:
  enum class Stage : std::uint8_t { kCalling, kChallenge, kHello, kWelcome, kOver };

  /// Somebody has called; it is sent a challenge.
  Encounter(Doorkeeper& door, Descriptor socket);
  /// This rank calls.
  Encounter(Doorkeeper& door, Descriptor socket, Call& call);

  void on_events(std::uint32_t events) override;
  bool makes(const Call& call) const { return call_ == &call; }
  bool over() const { return stage_ == Stage::kOver; }
  bool late(Clock::time_point now) const { return now >= until_; }
  /// Hangs up. The object stays, for events may be on their way to it.
  void hang_up();
  void begin();

 private:
  // Counts a handshake for as long as it lasts.
  struct Uncount {
    void operator()(OpenHandshakes* open) const { --*open; }
  };

  std::size_t expected() const;
  bool send_all(std::span<const std::byte> bytes);
  void called();
  void receive();
  void received();
  void received_challenge();
  void received_hello();
  void received_welcome();
  void broken_off(int error);
  void drop(std::uint64_t StrangerCounts::* reason);
  void fail_for_good();
  void enter(const HelloFacts& facts);

  Doorkeeper& door_;
  Descriptor socket_;
  Call* call_ = nullptr;  // null: somebody else has called
  std::unique_ptr<OpenHandshakes, Uncount> counted_;
  Stage stage_;
  Clock::time_point until_ = Clock::time_point::max();
  Nonce listener_nonce_ = {};
  Nonce caller_nonce_ = {};
  std::array<std::byte, kHelloBytes> input_;  // the longest of the three
  std::size_t input_bytes_ = 0;
};

}  // namespace multiring::tcp
