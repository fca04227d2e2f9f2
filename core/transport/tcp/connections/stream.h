#pragma once

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

/// The two streams between this rank and a peer on one channel, over one or several connections: matches
/// frames with what is posted.
class TcpStream {
 public:
  TcpStream(int rank, int peer, int channel, std::size_t stripes, std::size_t whole_below);

  int peer() const { return peer_; }
  int channel() const { return channel_; }
  std::size_t stripes() const { return links_.size(); }
  bool has_link(std::size_t stripe) const { return links_[stripe] && links_[stripe]->open(); }
  /// All connections have been made. Before, one that has ended may be made anew.
  bool complete() const { return complete_; }
  DataLink& add_link(std::size_t stripe, std::uint32_t weight, Descriptor socket, LinkObserver& observer);
  std::span<const std::unique_ptr<DataLink>> links() const { return links_; }
  void set_weights(std::span<const std::uint32_t> weights) { balance_.fix_weights(weights); }

  void post_send(Message& message);
  void post_receive(Message& message);

  struct Match {
    Message* message = nullptr;  ///< null: nothing is posted yet, unless there is a fault
    ErrorKind kind = {};
    std::string fault = {};
  };
  /// The receive that a frame belongs to, which then takes it.
  Match match(const FrameHeader& header);
  void received(Message& message);
  void sent(Message& message);

  /// Nothing more will be taken by the peer; nothing more will come. Pending messages are lost.
  void lose_sends(Message::State state = Message::State::kLost);
  void lose_receives(Message::State state = Message::State::kLost);
  bool sends_lost() const { return sends_lost_; }
  bool receives_lost() const { return receives_lost_; }
  /// A pending message is given up: the stream is out of step from now on.
  void stop();
  bool stopped() const { return stopped_; }

 private:
  static void finish(Message& message, std::deque<Message*>& messages, std::uint64_t posted);
  static void lose(std::deque<Message*>& messages, Message::State state);
  /// Looks what the connections still have to do, and now and then how fast they are.
  void measure_links();
  Match mismatch(const FrameHeader& header, const Message& message) const;

  int rank_;
  int peer_;
  int channel_;
  std::vector<std::unique_ptr<DataLink>> links_;
  LinkBalance balance_;
  std::vector<std::unique_ptr<DataLink>> replaced_;  // events may be on their way to them
  bool complete_ = false;
  // In their order: the last ones of those that were posted. Null: done, before one that was posted earlier;
  // the owner of its ticket may have used it up.
  std::deque<Message*> sends_;
  std::deque<Message*> receives_;
  std::uint64_t sends_posted_ = 0;
  std::uint64_t receives_posted_ = 0;
  bool sends_lost_ = false;
  bool receives_lost_ = false;
  bool stopped_ = false;
  std::vector<StripeRange> ranges_;
  std::vector<LinkProgress> progress_;
  std::vector<std::size_t> backlogs_;
};

}  // namespace multiring::tcp
