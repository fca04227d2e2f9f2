#pragma once

#include <cstdint>
#include <deque>

#include "transport/tcp/connections/connection.h"
#include "transport/tcp/connections/frame.h"
#include "transport/tcp/connections/message_table.h"

namespace multiring::tcp {

class TcpStream;

/// One of the connections of a stream. Payload is sent from and received into the posted memory, without a
/// copy. A frame for which nothing is posted yet stays in the socket, where it blocks only its own stream.
class DataConnection final : public TcpConnection {
 public:
  DataConnection(Descriptor socket, int peer, ConnectionObserver& observer, TcpStream& stream)
      : TcpConnection(std::move(socket), peer, observer), stream_(stream) {}

  void advance() override;
  /// Sends only.
  void advance_output();
  bool can_advance() const override {
    return open() && ((readable_ && !blocked_) || (writable_ && !output_.empty()));
  }
  /// A frame has come for which nothing is posted.
  bool is_blocked() const { return blocked_ && !input_stopped_; }
  /// A receive was posted.
  void resume_input() { blocked_ = input_stopped_; }
  /// `range`: the part of `message` that this connection carries.
  void enqueue(Message& message, const StripeRange& range, std::uint32_t channel);
  /// Enqueued bytes that the peer's kernel does not have yet, about.
  std::size_t backlog() const;
  /// Reads, or writes, nothing any more: posted memory is not touched again.
  void stop_input();
  void stop_output() {
    output_.clear();
    output_bytes_ = 0;
  }

 private:
  struct Output {
    Message* message;
    FrameHeaderBytes header;
    std::size_t offset;
    std::size_t bytes;     // of the payload
    std::size_t sent = 0;  // of the header and the payload
    // The first part of the message that is not all sent, and its offset in the message.
    std::size_t part = 0;
    std::size_t part_offset = 0;
  };

  void read();
  bool read_header();
  bool open_frame();
  void write();
  std::size_t write_some(Output& output);

  TcpStream& stream_;
  FrameHeaderBytes input_;
  std::size_t input_bytes_ = 0;
  FrameHeader header_;               // of the frame being read, once input_ is complete
  Message* receiving_ = nullptr;     // where its payload goes
  std::size_t received_ = 0;         // of its payload
  std::uint64_t last_sequence_ = 0;  // of the frame before
  bool blocked_ = false;             // nothing is posted for the frame
  bool input_stopped_ = false;
  std::deque<Output> output_;
  std::size_t output_bytes_ = 0;  // unsent ones
};

}  // namespace multiring::tcp
