#include "transport/tcp/tcp_network.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "base/immovable.h"

namespace multiring::tcp {
namespace {

using Outcome = WaitResult::Outcome;

/// Longest sleep between checks of interrupts and timers.
constexpr double kTimeSlice = 0.05;

}  // namespace

/// The role of the thread that drives.
class TcpNetwork::Driver : Immovable {
 public:
  explicit Driver(TcpNetwork& network) : network_(network) {}
  ~Driver() { release(); }
  /// Whether this thread drives now. Under the lock.
  bool take() {
    if (!network_.driven_) taken_ = network_.driven_ = true;
    return taken_;
  }
  bool taken() const { return taken_; }
  /// One of those that sleep takes over.
  void release() {
    if (!std::exchange(taken_, false)) return;
    const std::lock_guard lock(network_.mutex_);
    network_.driven_ = false;
    network_.progressed_.notify_one();
  }

 private:
  TcpNetwork& network_;
  bool taken_ = false;
};

WaitResult TcpNetwork::wait(std::span<const Ticket> tickets, const WaitOptions& waiting) {
  return drive(waiting, [&](WaitResult* result) { return check_tickets(tickets, result); });
}

WaitResult TcpNetwork::wait_any(std::span<const Ticket> tickets, const WaitOptions& waiting) {
  return drive(waiting, [&](WaitResult* result) { return check_any(tickets, result); });
}

WaitResult TcpNetwork::drive(const WaitOptions& waiting, const std::function<bool(WaitResult*)>& finished) {
  waiting.deadline.start();
  const Clock::time_point start = Clock::now();
  Clock::time_point last_check = start;
  bool stall_reported = waiting.stall_after <= 0 || waiting.stalled == nullptr;
  Driver driver(*this);
  for (;;) {
    const Clock::time_point now = Clock::now();
    bool busy = false;
    std::uint64_t seen = 0;
    {
      const std::lock_guard lock(mutex_);
      if (driver.take()) handle_events();
      WaitResult result;
      if (finished(&result)) return result;
      busy = !ready_connections_.empty();
      seen = progress_version_;
    }
    if (waiting.is_cancelled()) return {Outcome::kCancelled};
    if (waiting.deadline.expired()) return {Outcome::kTimeout};
    const double waited = seconds_between(start, now);
    if (seconds_between(last_check, now) >= kTimeSlice / 2) {
      last_check = now;
      driver.release();  // callbacks may wait here, too
      waiting.check_interrupt();
      if (!stall_reported && waited >= waiting.stall_after) {
        stall_reported = true;
        (*waiting.stalled)(waited);
      }
    }
    const double sleep = std::min(kTimeSlice, waiting.deadline.remaining());
    if (driver.taken()) {
      poller_.sleep(busy ? 0 : static_cast<int>(std::ceil(sleep * 1000)));
      continue;
    }
    std::unique_lock lock(mutex_);
    ++sleepers_;
    progressed_.wait_for(lock, std::chrono::duration<double>(sleep),
                         [&] { return !driven_ || progress_version_ != seen; });
    --sleepers_;
  }
}

void TcpNetwork::handle_events() {
  poller_.dispatch();
  advance_connections();
  check_timers();
  ++progress_version_;
  if (sleepers_ > 0) progressed_.notify_all();
}

void TcpNetwork::wake_waits() {
  ++progress_version_;
  if (driven_) poller_.wake();
  if (sleepers_ > 0) progressed_.notify_all();
}

// Where another thread drives it makes the progress.
void TcpNetwork::progress() {
  Driver driver(*this);
  {
    const std::lock_guard lock(mutex_);
    if (!driver.take()) return;
  }
  poller_.sleep(0);
  const std::lock_guard lock(mutex_);
  handle_events();
}

// Each connection of the queue once; those that can advance further are queued again.
void TcpNetwork::advance_connections() {
  for (std::size_t left = ready_connections_.size(); left > 0; --left) {
    TcpConnection& connection = *ready_connections_.front();
    ready_connections_.pop_front();
    connection.queued = false;
    connection.advance();
    if (connection.can_advance()) on_ready(connection);
  }
}

void TcpNetwork::on_ready(TcpConnection& connection) {
  if (!connection.queued) ready_connections_.push_back(&connection);
  connection.queued = true;
}

bool TcpNetwork::check_tickets(std::span<const Ticket> tickets, WaitResult* result) {
  int lost_peer = -1;
  const Message* out_of_step = nullptr;
  bool all_done = true;
  for (const Ticket ticket : tickets) {
    const Message* message = messages_.find(ticket);
    if (message == nullptr)
      throw Error(ErrorKind::kInternal, "a wait for a message whose ticket was used before");
    // A rank may have left because another one died.
    if (message->state == Message::State::kLost && (lost_peer < 0 || peer(lost_peer).left))
      lost_peer = message->peer;
    if (message->state == Message::State::kOutOfStep) out_of_step = message;
    all_done = all_done && message->state == Message::State::kDone;
  }
  if (all_done) {
    for (const Ticket ticket : tickets)
      if (Message* message = messages_.find(ticket)) messages_.release(*message);
    *result = {};
    return true;
  }
  if (abort_) {
    *result = {Outcome::kAborted};
    return true;
  }
  if (lost_peer >= 0) {
    *result = {Outcome::kPeerLost, lost_peer, peer(lost_peer).left};
    return true;
  }
  if (out_of_step != nullptr) throw_out_of_step(*out_of_step);
  return false;
}

void TcpNetwork::throw_out_of_step(const Message& message) const {
  throw Error(ErrorKind::kInternal, "a wait for message " + std::to_string(message.sequence) +
                                        " on channel " + std::to_string(message.channel) + " between rank " +
                                        std::to_string(options_.rank) + " and rank " +
                                        std::to_string(message.peer) + ", of which rank " +
                                        std::to_string(options_.rank) + " gave up another one");
}

bool TcpNetwork::check_any(std::span<const Ticket> tickets, WaitResult* result) const {
  const Message* lost = nullptr;
  const Message* out_of_step = nullptr;
  for (const Ticket ticket : tickets) {
    const Message* message = messages_.find(ticket);
    if (message == nullptr || message->state == Message::State::kDone) return true;
    // A rank may have left because another one died.
    if (message->state == Message::State::kLost && (lost == nullptr || peer(lost->peer).left)) lost = message;
    if (message->state == Message::State::kOutOfStep) out_of_step = message;
  }
  if (abort_)
    *result = {Outcome::kAborted};
  else if (lost != nullptr)
    *result = {Outcome::kPeerLost, lost->peer, peer(lost->peer).left};
  else if (out_of_step != nullptr)
    throw_out_of_step(*out_of_step);
  return !result->ok();
}

void TcpNetwork::abandon() { descriptors_.close_all(); }

void TcpNetwork::wake() {
  const std::lock_guard lock(mutex_);
  wake_waits();
}

const TcpStream& TcpNetwork::stream(int rank, int channel) const {
  if (rank >= 0 && rank < options_.size) {
    const auto found = peer(rank).streams.find(channel);
    if (found != peer(rank).streams.end() && found->second->complete() && peer(rank).control)
      return *found->second;
  }
  throw Error(ErrorKind::kInternal, "rank " + std::to_string(options_.rank) + " has no link to rank " +
                                        std::to_string(rank) + " on channel " + std::to_string(channel) +
                                        ": the plan did not connect it");
}

TcpStream& TcpNetwork::stream_to_post(int rank, int channel) {
  auto& found = const_cast<TcpStream&>(stream(rank, channel));
  if (found.stopped() || left_)
    throw Error(ErrorKind::kInternal, "a message posted on channel " + std::to_string(channel) + " to rank " +
                                          std::to_string(rank) + " after " +
                                          (left_ ? "this rank has left" : "an earlier one was given up"));
  return found;
}

Network::Ticket TcpNetwork::post_send(int rank, int channel,
                                      std::span<const std::span<const std::byte>> parts) {
  const std::lock_guard lock(mutex_);
  TcpStream& to = stream_to_post(rank, channel);
  Message& message = messages_.take();
  message.peer = rank;
  message.channel = channel;
  message.parts.assign(parts.begin(), parts.end());
  message.bytes = 0;
  for (const auto part : parts) message.bytes += part.size();
  to.post_send(message);
  // At once: the peer may be waiting, and this rank may compute next.
  bool all_open = true;
  for (const auto& connection : to.connections()) {
    connection->advance_output();
    if (connection->can_advance()) on_ready(*connection);
    all_open = all_open && connection->open();
  }
  if (!ready_connections_.empty() || !all_open) wake_waits();
  return message.ticket;
}

Network::Ticket TcpNetwork::post_receive(int rank, int channel, std::span<std::byte> buffer) {
  const std::lock_guard lock(mutex_);
  TcpStream& from = stream_to_post(rank, channel);
  Message& message = messages_.take();
  message.peer = rank;
  message.channel = channel;
  message.buffer = buffer;
  message.bytes = buffer.size();
  from.post_receive(message);
  for (const auto& connection : from.connections())
    if (connection->can_advance()) on_ready(*connection);
  if (!ready_connections_.empty()) wake_waits();
  return message.ticket;
}

bool TcpNetwork::done(Ticket ticket) const {
  const std::lock_guard lock(mutex_);
  const Message* message = messages_.find(ticket);
  return message != nullptr && message->state == Message::State::kDone;
}

void TcpNetwork::give_up(std::span<const Ticket> tickets) {
  const std::lock_guard lock(mutex_);
  for (const Ticket ticket : tickets) {
    Message* message = messages_.find(ticket);
    if (message == nullptr) continue;
    if (message->pending()) {
      peer(message->peer).streams.at(message->channel)->stop();
      wake_waits();
    }
    messages_.release(*message);
  }
}

bool TcpNetwork::is_ahead(int rank, int channel) const {
  const std::lock_guard lock(mutex_);
  const auto found = peer(rank).streams.find(channel);
  return found != peer(rank).streams.end() && found->second->is_ahead();
}

WaitResult TcpNetwork::ended(int rank) const {
  const std::lock_guard lock(mutex_);
  const Peer& other = peer(rank);
  // Once the control connection is closed no goodbye can come; what was sent before may.
  const bool closed = other.control && !other.control->open() && !needs_control(other);
  if (!other.left && !other.dead && !closed) return {};
  return {Outcome::kPeerLost, rank, other.left};
}

RejectedCounts TcpNetwork::rejected() const {
  const std::lock_guard lock(mutex_);
  return acceptor_.rejected();
}

std::size_t TcpNetwork::stripes(int rank, int channel) const {
  const std::lock_guard lock(mutex_);
  return stream(rank, channel).stripes();
}

void TcpNetwork::set_weights(int rank, int channel, std::span<const std::uint32_t> weights) {
  const std::lock_guard lock(mutex_);
  auto& found = const_cast<TcpStream&>(stream(rank, channel));
  const bool some =
      std::any_of(weights.begin(), weights.end(), [](std::uint32_t weight) { return weight > 0; });
  if (weights.size() != found.stripes() || !some)
    throw Error(ErrorKind::kUsage, std::to_string(weights.size()) + " weights for " +
                                       std::to_string(found.stripes()) + " connections, or all of them 0");
  found.set_weights(weights);
}

}  // namespace multiring::tcp
