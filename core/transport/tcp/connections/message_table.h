#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "transport/network.h"
#include "transport/tcp/connections/stripes.h"

namespace multiring::tcp {

/// A message that was posted.
struct Message {
  enum class State : std::uint8_t {
    kFree,
    kPending,
    kDone,
    kLost,       ///< with its peer
    kOutOfStep,  ///< this rank gave up another one of its stream
  };

  Network::Ticket ticket = 0;
  State state = State::kFree;
  int peer = -1;
  int channel = 0;
  std::uint64_t sequence = 0;  ///< in its stream: 1, 2, 3, ...
  std::size_t bytes = 0;
  std::size_t moved = 0;                          ///< of a send: frames; of a receive: bytes
  std::size_t frames = 0;                         ///< of a send: how many carry it
  std::vector<std::span<const std::byte>> parts;  ///< of a send
  std::span<std::byte> buffer;                    ///< of a receive
  std::vector<StripeRange> ranges;                ///< of a receive: what was received or is being received

  bool pending() const { return state == State::kPending; }
};

/// The messages behind tickets. A ticket names a place and how often the place was used, so that one that was
/// used up is known as such.
class MessageTable {
 public:
  Message& take() {
    if (free_.empty()) {
      const std::uint64_t place = messages_.size();
      messages_.emplace_back().ticket = (std::uint64_t{1} << kPlaceBits) | place;
      free_.push_back(place);
    }
    Message& message = messages_[free_.back()];
    free_.pop_back();
    message.state = Message::State::kPending;
    return message;
  }
  /// Null: a ticket that was used up or never given.
  Message* find(Network::Ticket ticket) {
    const std::uint64_t place = ticket & kPlaces;
    if (place >= messages_.size()) return nullptr;
    Message& message = messages_[place];
    return message.ticket == ticket && message.state != Message::State::kFree ? &message : nullptr;
  }
  /// The memory of its lists is kept for the next one.
  void release(Message& message) {
    free_.push_back(message.ticket & kPlaces);
    message.ticket += std::uint64_t{1} << kPlaceBits;
    message.state = Message::State::kFree;
    message.moved = 0;
    message.frames = 0;
    message.parts.clear();
    message.ranges.clear();
    message.buffer = {};
  }

 private:
  static constexpr unsigned kPlaceBits = 24;
  static constexpr std::uint64_t kPlaces = (std::uint64_t{1} << kPlaceBits) - 1;
  std::deque<Message> messages_;  // which leaves its elements where they are
  std::vector<std::uint64_t> free_;
};

}  // namespace multiring::tcp
