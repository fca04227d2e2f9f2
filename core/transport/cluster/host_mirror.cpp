#include "transport/cluster/host_mirror.h"

#include <cstring>
#include <string>
#include <utility>

#include "base/arithmetic/kernels/copy.h"
#include "transport/cluster/channels.h"
#include "transport/rounds.h"
#include "transport/timed_wait.h"

namespace multiring {
namespace {

using Bytes = std::span<const std::byte>;

/// Whether the staging memory of a message's ranks, `bytes` in all, is one message.
bool is_combined(const MirrorMessage& message, std::size_t bytes) {
  return message.ranks.size() > 1 && bytes <= MirrorRoutes::kMaxCombined;
}

}  // namespace

void set_following_bytes(std::byte* header, std::uint64_t bytes) {
  std::memcpy(header + Rounds::kUserHeaderBytes, &bytes, sizeof bytes);
}

std::uint64_t following_bytes(const std::byte* header) {
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, header + Rounds::kUserHeaderBytes, sizeof bytes);
  return bytes;
}

HostMirror::HostMirror(Network& network, const MirrorRoutes& routes, RoundMemory memory)
    : network_(network), steps_(routes.steps), memory_(std::move(memory)) {
  std::size_t offset = 0;
  for (std::size_t step = 0; step < steps_.size(); ++step) {
    for (const MirrorMessage& message : steps_[step].in) {
      Incoming& incoming = incoming_.emplace_back();
      incoming.message = &message;
      incoming.step = step;
      incoming.offset = offset;
      if (message.ranks.size() > 1)
        offset += message.ranks.size() * Rounds::kHeaderBytes + MirrorRoutes::kMaxCombined;
    }
  }
  for (std::size_t index = 0; index < incoming_.size(); ++index)
    for (std::size_t later = index + 1; later < incoming_.size() && incoming_[index].after == nullptr;
         ++later)
      if (incoming_[later].message->peer == incoming_[index].message->peer) {
        incoming_[index].after = &incoming_[later];
        incoming_[later].first = false;
      }
  scratch_ = std::make_shared<std::vector<std::byte>>(offset);
  network_.keep(scratch_);
  if (steps_.size() > 1) gossip_.emplace(network_, kGossip, peers(), memory_.gossip);
}

std::set<int> HostMirror::peers() const {
  std::set<int> peers;
  for (const MirrorStep& step : steps_)
    for (const auto* const messages : {&step.out, &step.in})
      for (const MirrorMessage& message : *messages) peers.insert(message.peer);
  return peers;
}

std::vector<Network::Link> HostMirror::links() const {
  std::vector<Network::Link> links;
  for (const int peer : peers()) {
    links.push_back({peer, kRounds});
    if (gossip_) links.push_back({peer, kGossip});
  }
  return links;
}

bool HostMirror::is_ahead(int rank) const { return network_.is_ahead(rank, kRounds); }

void HostMirror::post(int rank, std::uint64_t round, std::size_t staged) {
  round_ = round;
  set_following_bytes(memory_.header(rank, round), staged);
  if (gossip_) gossip_->start();
  for (Incoming& incoming : incoming_) incoming.arrived = false;
  for (Incoming& incoming : incoming_)
    if (incoming.first) receive_headers(incoming);
  sent_steps_ = 0;
  send_complete_steps();
}

void HostMirror::receive_headers(Incoming& incoming) {
  const std::vector<int>& ranks = incoming.message->ranks;
  std::byte* const to =
      ranks.size() > 1 ? scratch_->data() + incoming.offset : memory_.header(ranks[0], round_);
  incoming.part = Incoming::Part::kHeaders;
  incoming.next = 0;
  incoming.ticket =
      network_.post_receive(incoming.message->peer, kRounds, {to, ranks.size() * Rounds::kHeaderBytes});
}

/// Of the first rank from incoming.next on that has any.
void HostMirror::receive_staging(Incoming& incoming) {
  const std::vector<int>& ranks = incoming.message->ranks;
  while (incoming.next < ranks.size() && staged_bytes(ranks[incoming.next]) == 0) ++incoming.next;
  if (incoming.next == ranks.size()) return;
  const int rank = ranks[incoming.next];
  incoming.ticket = network_.post_receive(incoming.message->peer, kRounds,
                                          {memory_.staging(rank, round_), staged_bytes(rank)});
}

WaitResult HostMirror::await(const WaitOptions& waiting) {
  TimedWait timed(waiting);
  // A slice for each message, so that a lost peer is found though others are slow. Early steps come first.
  for (std::size_t next = 0;;) {
    if (left_.load(std::memory_order_relaxed)) return {WaitResult::Outcome::kCancelled};
    handle_messages();
    std::vector<Incoming*> pending;
    for (Incoming& incoming : incoming_)
      if (incoming.ticket != 0) pending.push_back(&incoming);
    const WaitOptions slice = timed.slice(kTimeSlice);
    const std::size_t index = next % (pending.size() + 1);
    WaitResult result;
    if (index == pending.size()) {
      sends_in_wait_.insert(sends_in_wait_.end(), sends_.begin(), sends_.end());
      sends_.clear();
      result = network_.wait(sends_in_wait_, slice);
      if (result.ok()) sends_in_wait_.clear();
    } else {
      ticket_in_wait_ = pending[index]->ticket;
      result = network_.wait({&ticket_in_wait_, 1}, slice);
      ticket_in_wait_ = 0;
      if (result.ok() && !left_.load(std::memory_order_relaxed)) advance(*pending[index]);
    }
    if (result.ok() && pending.empty() && sends_.empty()) return {};
    next = result.ok() ? 0 : next + 1;
    if (!result.ok() && result.outcome != WaitResult::Outcome::kTimeout) return result;
    if (!result.ok()) {
      handle_arrivals();
      gossip();
    }
    if (timed.expired()) return {WaitResult::Outcome::kTimeout};
  }
}

/// The receive is done, and its ticket released.
void HostMirror::advance(Incoming& incoming) {
  incoming.ticket = 0;
  switch (incoming.part) {
    case Incoming::Part::kHeaders:
      handle_headers(incoming);
      break;
    case Incoming::Part::kCombined:
      handle_combined(incoming);
      break;
    case Incoming::Part::kSeparate:
      memory_.on_arrival(incoming.message->ranks[incoming.next++], round_);
      receive_staging(incoming);
      break;
  }
  if (incoming.ticket != 0) return;
  incoming.arrived = true;
  if (incoming.after != nullptr) receive_headers(*incoming.after);
  send_complete_steps();
}

void HostMirror::handle_headers(Incoming& incoming) {
  const MirrorMessage& message = *incoming.message;
  if (message.ranks.size() > 1) {
    const std::byte* from = scratch_->data() + incoming.offset;
    for (const int rank : message.ranks) {
      std::memcpy(memory_.header(rank, round_), from, Rounds::kHeaderBytes);
      from += Rounds::kHeaderBytes;
    }
  }
  const std::size_t bytes = staged_bytes(message);
  for (const int rank : message.ranks) {
    if (staged_bytes(rank) == 0)
      memory_.on_arrival(rank, round_);
    else
      memory_.gossip.on_reached(rank, round_);
  }
  if (bytes == 0) return;
  if (!is_combined(message, bytes)) {
    incoming.part = Incoming::Part::kSeparate;
    return receive_staging(incoming);
  }
  incoming.part = Incoming::Part::kCombined;
  std::byte* const to = scratch_->data() + incoming.offset + message.ranks.size() * Rounds::kHeaderBytes;
  incoming.ticket = network_.post_receive(message.peer, kRounds, {to, bytes});
}

void HostMirror::handle_combined(Incoming& incoming) {
  const MirrorMessage& message = *incoming.message;
  const std::byte* from = scratch_->data() + incoming.offset + message.ranks.size() * Rounds::kHeaderBytes;
  for (const int rank : message.ranks) {
    const std::size_t bytes = staged_bytes(rank);
    if (bytes == 0) continue;
    copy_bytes(memory_.staging(rank, round_), from, bytes);
    from += bytes;
    memory_.on_arrival(rank, round_);
  }
}

std::size_t HostMirror::staged_bytes(int rank) const {
  const std::uint64_t bytes = following_bytes(memory_.header(rank, round_));
  if (bytes > memory_.staging_bytes)
    throw Error(ErrorKind::kInternal, "rank " + std::to_string(rank) + " sends " + std::to_string(bytes) +
                                          " bytes in a round of at most " +
                                          std::to_string(memory_.staging_bytes));
  return bytes;
}

std::size_t HostMirror::staged_bytes(const MirrorMessage& message) const {
  std::size_t bytes = 0;
  for (const int rank : message.ranks) bytes += staged_bytes(rank);
  return bytes;
}

/// The messages of steps that have all they forward.
void HostMirror::send_complete_steps() {
  for (; sent_steps_ < steps_.size(); ++sent_steps_) {
    for (const Incoming& incoming : incoming_)
      if (incoming.step < sent_steps_ && !incoming.arrived) return;
    for (const MirrorMessage& message : steps_[sent_steps_].out) send(message);
  }
}

void HostMirror::send(const MirrorMessage& message) {
  std::vector<Bytes> headers;
  std::vector<Bytes> staging;
  for (const int rank : message.ranks) {
    headers.push_back({memory_.header(rank, round_), Rounds::kHeaderBytes});
    if (const std::size_t bytes = staged_bytes(rank); bytes > 0)
      staging.push_back({memory_.staging(rank, round_), bytes});
  }
  sends_.push_back(network_.post_send(message.peer, kRounds, headers));
  if (staging.empty()) return;
  if (is_combined(message, staged_bytes(message))) {
    sends_.push_back(network_.post_send(message.peer, kRounds, staging));
    return;
  }
  for (const Bytes& part : staging) sends_.push_back(network_.post_send(message.peer, kRounds, {&part, 1}));
}

// Of all ranks, not only the one that is waited for: the ranks of this host wait for them, too.
void HostMirror::handle_arrivals() {
  if (left_.load(std::memory_order_relaxed)) return;
  handle_messages();
  if (gossip_) gossip_->handle_arrivals();
}

void HostMirror::handle_messages() {
  for (Incoming& incoming : incoming_)
    while (incoming.ticket != 0 && incoming.ticket != ticket_in_wait_ && network_.done(incoming.ticket)) {
      network_.give_up({&incoming.ticket, 1});
      advance(incoming);
    }
}

void HostMirror::gossip() {
  if (gossip_ && !left_.load(std::memory_order_relaxed)) gossip_->send(round_);
}

}  // namespace multiring
