#include "transport/cluster/host_mirror.h"

#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "transport/timed_wait.h"

namespace multiring {
namespace {

constexpr int kRounds = 0;  // channels
constexpr int kRollCall = 1;
// Staging memory of several ranks goes together up to here, by way of a copy.
constexpr std::size_t kMostTogether = 16 * 1024;

using Bytes = std::span<const std::byte>;

/// Whether the staging memory of a message's ranks, `bytes` in all, is one message.
bool together(const MirrorMessage& message, std::size_t bytes) {
  return message.ranks.size() > 1 && bytes <= kMostTogether;
}

}  // namespace

void set_following_bytes(std::byte* header, std::uint64_t bytes) {
  std::memcpy(header + Transport::kUserHeaderBytes, &bytes, sizeof bytes);
}

std::uint64_t following_bytes(const std::byte* header) {
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, header + Transport::kUserHeaderBytes, sizeof bytes);
  return bytes;
}

HostMirror::HostMirror(std::unique_ptr<Network> network, const MirrorRoutes& routes, RoundMemory memory)
    : network_(std::move(network)), steps_(routes.steps), memory_(std::move(memory)) {
  std::size_t place = 0;
  for (std::size_t step = 0; step < steps_.size(); ++step) {
    for (const MirrorMessage& message : steps_[step].in) {
      Incoming& incoming = incoming_.emplace_back();
      incoming.message = &message;
      incoming.step = step;
      incoming.place = place;
      if (message.ranks.size() > 1) place += message.ranks.size() * Transport::kHeaderBytes + kMostTogether;
    }
  }
  scratch_ = std::make_shared<std::vector<std::byte>>(place);
  network_->keep(scratch_);
  if (channels(routes) > 1) roll_call_.emplace(*network_, kRollCall, peers(), memory_.knowledge);
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
    if (roll_call_) links.push_back({peer, kRollCall});
  }
  return links;
}

void HostMirror::post(int rank, std::uint64_t round, std::size_t staged) {
  round_ = round;
  set_following_bytes(memory_.header(rank, round), staged);
  if (roll_call_) roll_call_->listen();
  for (Incoming& incoming : incoming_) expect_headers(incoming);
  sent_steps_ = 0;
  send_what_is_complete();
}

void HostMirror::expect_headers(Incoming& incoming) {
  const std::vector<int>& ranks = incoming.message->ranks;
  std::byte* const to =
      ranks.size() > 1 ? scratch_->data() + incoming.place : memory_.header(ranks[0], round_);
  incoming.part = Incoming::Part::kHeaders;
  incoming.next = 0;
  incoming.expected =
      network_->post_receive(incoming.message->peer, kRounds, {to, ranks.size() * Transport::kHeaderBytes});
}

/// Of the ranks from incoming.next on, if they are not all there.
void HostMirror::expect_staging(Incoming& incoming) {
  const std::vector<int>& ranks = incoming.message->ranks;
  while (incoming.next < ranks.size() && staged_bytes(ranks[incoming.next]) == 0) ++incoming.next;
  if (incoming.next == ranks.size()) return;
  const int rank = ranks[incoming.next];
  incoming.expected = network_->post_receive(incoming.message->peer, kRounds,
                                             {memory_.staging(rank, round_), staged_bytes(rank)});
}

WaitResult HostMirror::await(const Waiting& waiting) {
  Patience patience(waiting);
  // A turn for each: whoever is lost is found though others are slow. The messages of early steps first, for
  // others wait for what they bring.
  for (std::size_t next = 0;;) {
    if (left_.load(std::memory_order_relaxed)) return {WaitResult::Outcome::kCancelled};
    take_in_messages();
    std::vector<Incoming*> pending;
    for (Incoming& incoming : incoming_)
      if (incoming.expected != 0) pending.push_back(&incoming);
    const Waiting turn = patience.turn(kTurn);
    const std::size_t index = next % (pending.size() + 1);
    WaitResult result;
    if (index == pending.size()) {
      leaving_.insert(leaving_.end(), sends_.begin(), sends_.end());
      sends_.clear();
      result = wait(leaving_, turn);
      if (result.ok()) leaving_.clear();
    } else {
      awaited_ = pending[index]->expected;
      result = wait({&awaited_, 1}, turn);
      awaited_ = 0;
      if (result.ok() && !left_.load(std::memory_order_relaxed)) advance(*pending[index]);
    }
    if (result.ok() && pending.empty() && sends_.empty()) return {};
    next = result.ok() ? 0 : next + 1;
    if (!result.ok() && result.outcome != WaitResult::Outcome::kTimeout) return result;
    if (!result.ok()) {
      take_in();
      tell();
    }
    if (patience.is_over()) return {WaitResult::Outcome::kTimeout};
  }
}

/// What was expected is there, and its ticket is used up.
void HostMirror::advance(Incoming& incoming) {
  incoming.expected = 0;
  switch (incoming.part) {
    case Incoming::Part::kHeaders:
      take_headers(incoming);
      break;
    case Incoming::Part::kTogether:
      take_together(incoming);
      break;
    case Incoming::Part::kEach:
      memory_.arrived(incoming.message->ranks[incoming.next++], round_);
      expect_staging(incoming);
      break;
  }
  if (incoming.expected == 0) send_what_is_complete();
}

void HostMirror::take_headers(Incoming& incoming) {
  const MirrorMessage& message = *incoming.message;
  if (message.ranks.size() > 1) {
    const std::byte* from = scratch_->data() + incoming.place;
    for (const int rank : message.ranks) {
      std::memcpy(memory_.header(rank, round_), from, Transport::kHeaderBytes);
      from += Transport::kHeaderBytes;
    }
  }
  const std::size_t bytes = staged_bytes(message);
  for (const int rank : message.ranks) {
    if (staged_bytes(rank) == 0)
      memory_.arrived(rank, round_);
    else
      memory_.knowledge.heard(rank, round_);
  }
  if (bytes == 0) return;
  if (!together(message, bytes)) {
    incoming.part = Incoming::Part::kEach;
    return expect_staging(incoming);
  }
  incoming.part = Incoming::Part::kTogether;
  std::byte* const to = scratch_->data() + incoming.place + message.ranks.size() * Transport::kHeaderBytes;
  incoming.expected = network_->post_receive(message.peer, kRounds, {to, bytes});
}

void HostMirror::take_together(Incoming& incoming) {
  const MirrorMessage& message = *incoming.message;
  const std::byte* from = scratch_->data() + incoming.place + message.ranks.size() * Transport::kHeaderBytes;
  for (const int rank : message.ranks) {
    const std::size_t bytes = staged_bytes(rank);
    if (bytes == 0) continue;
    std::memcpy(memory_.staging(rank, round_), from, bytes);
    from += bytes;
    memory_.arrived(rank, round_);
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

/// The messages of steps for which all is there.
void HostMirror::send_what_is_complete() {
  for (; sent_steps_ < steps_.size(); ++sent_steps_) {
    for (const Incoming& incoming : incoming_)
      if (incoming.step < sent_steps_ && incoming.expected != 0) return;
    for (const MirrorMessage& message : steps_[sent_steps_].out) send(message);
  }
}

void HostMirror::send(const MirrorMessage& message) {
  std::vector<Bytes> headers;
  std::vector<Bytes> staging;
  for (const int rank : message.ranks) {
    headers.push_back({memory_.header(rank, round_), Transport::kHeaderBytes});
    if (const std::size_t bytes = staged_bytes(rank); bytes > 0)
      staging.push_back({memory_.staging(rank, round_), bytes});
  }
  sends_.push_back(network_->post_send(message.peer, kRounds, headers));
  if (staging.empty()) return;
  if (together(message, staged_bytes(message))) {
    sends_.push_back(network_->post_send(message.peer, kRounds, staging));
    return;
  }
  for (const Bytes& part : staging) sends_.push_back(network_->post_send(message.peer, kRounds, {&part, 1}));
}

// Not only from the rank that is waited for: the others of this host wait for the rest, and errors tell who
// has come.
void HostMirror::take_in() {
  if (left_.load(std::memory_order_relaxed)) return;
  take_in_messages();
  if (roll_call_) roll_call_->take_in();
}

void HostMirror::take_in_messages() {
  for (Incoming& incoming : incoming_)
    while (incoming.expected != 0 && incoming.expected != awaited_ && network_->done(incoming.expected)) {
      network_->give_up({&incoming.expected, 1});
      advance(incoming);
    }
}

void HostMirror::tell() {
  if (roll_call_ && !left_.load(std::memory_order_relaxed)) roll_call_->tell(round_);
}

void HostMirror::look() {
  if (const DriverSeat::Ride ride(seat_); ride) network_->progress();
}

void HostMirror::leave() {
  left_.store(true, std::memory_order_relaxed);
  network_->leave();
}

WaitResult HostMirror::wait(std::span<const Ticket> tickets, const Waiting& waiting) {
  for (;;) {
    if (const DriverSeat::Ride ride(seat_); ride) return network_->wait(tickets, waiting);
    std::this_thread::yield();  // to a thread that looks, which is short
  }
}

}  // namespace multiring
