#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/tcp/connections/connection_balance.h"
#include "transport/tcp/connections/data_connection.h"
#include "transport/tcp/connections/message_table.h"

namespace multiring::tcp {

/// The two streams between this rank and a peer on a channel. Matches frames with posted receives.
class TcpStream {
 public:
  TcpStream(int rank, int peer, int channel, std::size_t stripes);

  int peer() const { return peer_; }
  int channel() const { return channel_; }
  std::size_t stripes() const { return connections_.size(); }
  bool has_connection(std::size_t stripe) const {
    return connections_[stripe] && connections_[stripe]->open();
  }
  /// All connections have been made. Until then a closed one may be replaced.
  bool complete() const { return complete_; }
  DataConnection& add_connection(std::size_t stripe, std::uint32_t weight, Descriptor socket,
                                 ConnectionObserver& observer);
  std::span<const std::unique_ptr<DataConnection>> connections() const { return connections_; }
  void set_weights(std::span<const std::uint32_t> weights) { balance_.fix_weights(weights); }

  /// A message has come whose receive is not posted.
  bool is_ahead() const {
    return std::ranges::any_of(connections_, [](const auto& each) { return each && each->is_blocked(); });
  }

  void post_send(Message& message);
  void post_receive(Message& message);

  struct Match {
    Message* message = nullptr;  ///< null: nothing is posted yet, unless there is a fault
    ErrorKind kind = {};
    std::string fault = {};
  };
  /// The receive that takes the frame.
  Match match(const FrameHeader& header);
  void received(Message& message);
  void sent(Message& message);

  /// The peer takes, or sends, nothing more: pending messages are lost.
  void fail_pending_sends(Message::State state = Message::State::kLost);
  void fail_pending_receives(Message::State state = Message::State::kLost);
  bool sends_failed() const { return sends_failed_; }
  bool receives_failed() const { return receives_failed_; }
  /// A pending message was given up, so later ones could not be matched.
  void stop();
  bool stopped() const { return stopped_; }

 private:
  static void finish(Message& message, std::deque<Message*>& messages, std::uint64_t posted);
  static void fail_all(std::deque<Message*>& messages, Message::State state);
  /// Updates the backlogs, and now and then the speeds.
  void measure_connections();
  Match mismatch(const FrameHeader& header, const Message& message) const;

  int rank_;
  int peer_;
  int channel_;
  std::vector<std::unique_ptr<DataConnection>> connections_;
  ConnectionBalance balance_;
  std::vector<std::unique_ptr<DataConnection>> replaced_;  // events may still be dispatched to them
  bool complete_ = false;
  // The last posted ones, in their order. Null: done, though an earlier one is not.
  std::deque<Message*> sends_;
  std::deque<Message*> receives_;
  std::uint64_t sends_posted_ = 0;
  std::uint64_t receives_posted_ = 0;
  bool sends_failed_ = false;
  bool receives_failed_ = false;
  bool stopped_ = false;
  std::vector<StripeRange> ranges_;
  std::vector<ConnectionProgress> progress_;
  std::vector<std::size_t> backlogs_;
};

}  // namespace multiring::tcp
