#include "transport/tcp/connections/data_connection.h"

#include <algorithm>
#include <array>

#include "transport/tcp/connections/stream.h"

namespace multiring::tcp {
namespace {

/// An advance stops after so many bytes in each direction.
constexpr std::size_t kAdvanceBytes = std::size_t{1} << 20;
constexpr std::size_t kMaxPieces = 64;

}  // namespace

void DataConnection::advance() {
  if (open() && readable_ && !blocked_) read();
  advance_output();
}

void DataConnection::advance_output() {
  if (open() && writable_ && !output_.empty()) write();
}

void DataConnection::read() {
  std::size_t moved = 0;
  while (open() && readable_ && moved < kAdvanceBytes) {
    if (receiving_ == nullptr && !(read_header() && open_frame())) return;
    if (received_ < header_.bytes) {
      std::byte* to = receiving_->buffer.data() + header_.offset + received_;
      const std::size_t got = receive(to, std::min<std::size_t>(header_.bytes - received_, kAdvanceBytes));
      if (got == 0) return;  // none for now, or closed, which may have lost the message
      received_ += got;
      receiving_->moved += got;
      moved += got;
    }
    if (received_ < header_.bytes) continue;
    Message& message = *receiving_;
    receiving_ = nullptr;
    input_bytes_ = 0;
    if (message.moved == message.bytes) stream_.received(message);
  }
}

bool DataConnection::read_header() {
  if (input_bytes_ < kFrameHeaderBytes)
    input_bytes_ += receive(input_.data() + input_bytes_, kFrameHeaderBytes - input_bytes_);
  return input_bytes_ == kFrameHeaderBytes;
}

// Finds the receive for the payload. False: there is none, or none yet.
bool DataConnection::open_frame() {
  const auto header = parse_frame_header(input_);
  const bool ours = header && header->kind == FrameKind::kData &&
                    header->channel == static_cast<std::uint32_t>(stream_.channel());
  if (!ours || header->sequence <= last_sequence_) {
    stop_input();
    observer_.on_fault(*this, ErrorKind::kInternal,
                       "sent something other than a frame of the message that is due");
    return false;
  }
  const TcpStream::Match match = stream_.match(*header);
  if (match.message == nullptr) {
    blocked_ = true;
    if (match.fault.empty()) return false;
    stop_input();
    observer_.on_fault(*this, match.kind, match.fault);
    return false;
  }
  header_ = *header;
  last_sequence_ = header_.sequence;
  receiving_ = match.message;
  received_ = 0;
  return true;
}

void DataConnection::enqueue(Message& message, const StripeRange& range, std::uint32_t channel) {
  const FrameHeader header = {FrameKind::kData, channel,      message.sequence,
                              message.bytes,    range.offset, range.bytes};
  output_.push_back({&message, encode_frame_header(header), range.offset, range.bytes});
  output_bytes_ += kFrameHeaderBytes + range.bytes;
}

std::size_t DataConnection::backlog() const { return output_bytes_ + unacknowledged(); }

void DataConnection::write() {
  std::size_t moved = 0;
  while (open() && writable_ && !output_.empty() && moved < kAdvanceBytes) {
    Output& output = output_.front();
    const std::size_t put = write_some(output);
    if (put == 0) return;
    output.sent += put;
    output_bytes_ -= put;
    moved += put;
    if (output.sent < kFrameHeaderBytes + output.bytes) continue;
    Message& message = *output.message;
    output_.pop_front();
    message.moved += 1;
    if (message.moved == message.frames) stream_.sent(message);
  }
}

std::size_t DataConnection::write_some(Output& output) {
  std::array<iovec, kMaxPieces> pieces;
  std::size_t count = 0;
  std::size_t room = kAdvanceBytes;
  if (output.sent < kFrameHeaderBytes)
    pieces[count++] = {output.header.data() + output.sent, kFrameHeaderBytes - output.sent};
  const std::size_t payload_sent = output.sent - std::min(output.sent, kFrameHeaderBytes);
  const std::vector<std::span<const std::byte>>& parts = output.message->parts;
  const std::size_t begin = output.offset + payload_sent;
  while (output.part < parts.size() && output.part_offset + parts[output.part].size() <= begin)
    output.part_offset += parts[output.part++].size();
  std::size_t skip = begin - output.part_offset;
  room = std::min(room, output.bytes - payload_sent);
  for (std::size_t i = output.part; i < parts.size() && room > 0 && count < kMaxPieces; ++i) {
    const std::span<const std::byte> part = parts[i];
    if (part.empty()) continue;
    const std::size_t bytes = std::min(room, part.size() - skip);
    pieces[count++] = {const_cast<std::byte*>(part.data() + skip), bytes};
    room -= bytes;
    skip = 0;
  }
  return send(pieces.data(), count);
}

void DataConnection::stop_input() {
  input_stopped_ = true;
  blocked_ = true;
  receiving_ = nullptr;
}

}  // namespace multiring::tcp
