#include "transport/tcp/connections/stream.h"

#include <algorithm>
#include <chrono>

namespace multiring::tcp {
namespace {

constexpr std::size_t kStripeThreshold = 64 * 1024;  // messages below it go over one connection

}  // namespace

TcpStream::TcpStream(int rank, int peer, int channel, std::size_t stripes)
    : rank_(rank),
      peer_(peer),
      channel_(channel),
      connections_(stripes),
      // Ranks of one host that send at once, and messages to several peers, spread over the interfaces.
      balance_(stripes, kStripeThreshold, static_cast<std::size_t>(peer)) {}

DataConnection& TcpStream::add_connection(std::size_t stripe, std::uint32_t weight, Descriptor socket,
                                          ConnectionObserver& observer) {
  if (connections_[stripe]) replaced_.push_back(std::move(connections_[stripe]));
  connections_[stripe] = std::make_unique<DataConnection>(std::move(socket), peer_, observer, *this);
  balance_.set_weight(stripe, weight);
  bool all = true;
  for (std::size_t i = 0; i < connections_.size(); ++i) all = all && has_connection(i);
  complete_ = complete_ || all;
  return *connections_[stripe];
}

void TcpStream::post_send(Message& message) {
  message.sequence = ++sends_posted_;
  if (sends_failed_) {
    message.state = Message::State::kLost;
    return;
  }
  sends_.push_back(&message);
  if (connections_.size() > 1) measure_connections();
  balance_.divide(message.bytes, backlogs_, ranges_);
  message.frames = ranges_.size();
  for (const StripeRange& range : ranges_)
    connections_[range.stripe]->enqueue(message, range, static_cast<std::uint32_t>(channel_));
}

void TcpStream::measure_connections() {
  backlogs_.clear();
  for (const auto& connection : connections_) backlogs_.push_back(connection->backlog());
  const double now = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  if (!balance_.wants_measurement(now)) return;
  progress_.clear();
  for (const auto& connection : connections_)
    progress_.push_back(connection->open() ? progress_of(connection->socket().get()) : ConnectionProgress{});
  balance_.measure(now, progress_);
}

void TcpStream::post_receive(Message& message) {
  message.sequence = ++receives_posted_;
  if (receives_failed_) {
    message.state = Message::State::kLost;
    return;
  }
  receives_.push_back(&message);
  for (const auto& connection : connections_) connection->resume_input();
}

TcpStream::Match TcpStream::match(const FrameHeader& header) {
  if (header.sequence > receives_posted_) return {};
  const std::uint64_t first = receives_posted_ - receives_.size() + 1;
  if (header.sequence < first) return {nullptr, ErrorKind::kInternal, "sent a message twice"};
  if (receives_[header.sequence - first] == nullptr)
    return {nullptr, ErrorKind::kInternal, "sent a message twice"};
  Message& message = *receives_[header.sequence - first];
  if (header.message_bytes != message.bytes) return mismatch(header, message);
  // parse_frame_header has checked that the range lies in the message.
  for (const StripeRange& range : message.ranges)
    if (header.offset < range.offset + range.bytes && range.offset < header.offset + header.bytes)
      return {nullptr, ErrorKind::kInternal, "sent a part of a message twice"};
  message.ranges.push_back({0, header.offset, header.bytes});
  return {&message};
}

TcpStream::Match TcpStream::mismatch(const FrameHeader& header, const Message& message) const {
  return {nullptr, ErrorKind::kMismatch,
          "sent " + std::to_string(header.message_bytes) + " bytes as message " +
              std::to_string(header.sequence) + " on channel " + std::to_string(channel_) + ", where rank " +
              std::to_string(rank_) + " expects " + std::to_string(message.bytes) + " bytes"};
}

void TcpStream::finish(Message& message, std::deque<Message*>& messages, std::uint64_t posted) {
  message.state = Message::State::kDone;
  messages[message.sequence - (posted - messages.size() + 1)] = nullptr;
  while (!messages.empty() && messages.front() == nullptr) messages.pop_front();
}

void TcpStream::received(Message& message) { finish(message, receives_, receives_posted_); }

void TcpStream::sent(Message& message) { finish(message, sends_, sends_posted_); }

void TcpStream::fail_all(std::deque<Message*>& messages, Message::State state) {
  for (Message* message : messages)
    if (message != nullptr) message->state = state;
  messages.clear();
}

void TcpStream::fail_pending_sends(Message::State state) {
  sends_failed_ = true;
  for (const auto& connection : connections_)
    if (connection) connection->stop_output();
  fail_all(sends_, state);
}

void TcpStream::fail_pending_receives(Message::State state) {
  receives_failed_ = true;
  for (const auto& connection : connections_)
    if (connection) connection->stop_input();
  fail_all(receives_, state);
}

void TcpStream::stop() {
  stopped_ = true;
  fail_pending_sends(Message::State::kOutOfStep);
  fail_pending_receives(Message::State::kOutOfStep);
}

}  // namespace multiring::tcp
