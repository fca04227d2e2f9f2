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
    kOutOfStep,  ///< this rank gave up another message of its stream
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
  std::vector<StripeRange> ranges;                ///< of a receive: received or being received

  bool pending() const { return state == State::kPending; }
};

/// Messages by ticket. A ticket consists of a slot and a count of the slot's uses.
class MessageTable {
 public:
  Message& take() {
    if (free_.empty()) {
      const std::uint64_t slot = messages_.size();
      messages_.emplace_back().ticket = (std::uint64_t{1} << kSlotBits) | slot;
      free_.push_back(slot);
    }
    Message& message = messages_[free_.back()];
    free_.pop_back();
    message.state = Message::State::kPending;
    return message;
  }
  /// Null: the ticket was released or never given.
  Message* find(Network::Ticket ticket) {
    const std::uint64_t slot = ticket & kSlotMask;
    if (slot >= messages_.size()) return nullptr;
    Message& message = messages_[slot];
    return message.ticket == ticket && message.state != Message::State::kFree ? &message : nullptr;
  }
  /// Keeps the memory of its lists for the next message.
  void release(Message& message) {
    free_.push_back(message.ticket & kSlotMask);
    message.ticket += std::uint64_t{1} << kSlotBits;
    message.state = Message::State::kFree;
    message.moved = 0;
    message.frames = 0;
    message.parts.clear();
    message.ranges.clear();
    message.buffer = {};
  }

 private:
  static constexpr unsigned kSlotBits = 24;
  static constexpr std::uint64_t kSlotMask = (std::uint64_t{1} << kSlotBits) - 1;
  std::deque<Message> messages_;  // its elements do not move
  std::vector<std::uint64_t> free_;
};

}  // namespace multiring::tcp
