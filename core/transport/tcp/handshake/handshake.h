#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "transport/tcp/handshake/acceptor.h"

namespace multiring::tcp {

/// A connection until its handshake is done.
class Acceptor::Handshake final : public EventSink {
 public:
  /// What is awaited: the connection itself, or a message.
  enum class Stage : std::uint8_t { kConnecting, kChallenge, kClientHello, kServerHello, kClosed };

  /// Of an incoming connection.
  Handshake(Acceptor& acceptor, Descriptor socket);
  /// Of a connection that this rank opens.
  Handshake(Acceptor& acceptor, Descriptor socket, ConnectAttempt& attempt);

  void start();
  void on_events(std::uint32_t events) override;
  bool is_of(const ConnectAttempt& attempt) const { return attempt_ == &attempt; }
  bool closed() const { return stage_ == Stage::kClosed; }
  bool timed_out(Clock::time_point now) const { return now >= time_limit_; }
  /// The object has to stay until all events are dispatched.
  void close();

 private:
  // Counts an open handshake.
  struct Decrement {
    void operator()(OpenHandshakes* open) const { --*open; }
  };

  std::size_t expected_bytes() const;
  bool send_all(std::span<const std::byte> bytes);
  void check_connected();
  void receive();
  void received();
  void received_challenge();
  void received_client_hello();
  void received_server_hello();
  void interrupted(int error);
  void reject(std::uint64_t RejectedCounts::* reason);
  void fail();
  void finish(const ConnectionInfo& info);

  Acceptor& acceptor_;
  Descriptor socket_;
  ConnectAttempt* attempt_ = nullptr;  // null: incoming
  std::unique_ptr<OpenHandshakes, Decrement> counted_;
  Stage stage_;
  Clock::time_point time_limit_ = Clock::time_point::max();
  Nonce server_nonce_ = {};
  Nonce client_nonce_ = {};
  std::array<std::byte, kClientHelloBytes> input_;  // the longest of the three messages
  std::size_t input_bytes_ = 0;
};

}  // namespace multiring::tcp
