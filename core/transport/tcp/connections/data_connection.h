#pragma once

#include <cstdint>
#include <deque>

#include "transport/tcp/connections/connection.h"
#include "transport/tcp/connections/frame.h"
#include "transport/tcp/connections/message_table.h"

namespace multiring::tcp {

class TcpStream;

/// One of the connections of a stream. A frame's payload goes straight from and to the memory that was
/// posted; a frame for which nothing is posted yet stays in the socket, where it holds up its own stream
/// alone.
class DataLink final : public TcpLink {
 public:
  DataLink(Descriptor socket, int peer, LinkObserver& observer, TcpStream& stream)
      : TcpLink(std::move(socket), peer, observer), stream_(stream) {}

  void turn() override;
  bool can_move() const override {
    return open() && ((readable_ && !held_up_) || (writable_ && !output_.empty()));
  }
  /// A receive was posted.
  void look_again() { held_up_ = input_stopped_; }
  /// The part of `message` that this connection carries.
  void put(Message& message, const StripeRange& range, std::uint32_t channel);
  /// Bytes that were put and the peer's kernel does not have yet, about.
  std::size_t backlog() const;
  /// Nothing is read, or written, any more: the memory of what was posted is given back.
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
    // The first part of the message of which something is left, and where it begins in the message.
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
  FrameHeader header_;               // of the frame that is being read, once input_ is whole
  Message* receiving_ = nullptr;     // where its payload goes
  std::size_t received_ = 0;         // of its payload
  std::uint64_t last_sequence_ = 0;  // of the frame before
  bool held_up_ = false;             // nothing is posted for the frame
  bool input_stopped_ = false;
  std::deque<Output> output_;
  std::size_t output_bytes_ = 0;  // left in it
};

}  // namespace multiring::tcp
