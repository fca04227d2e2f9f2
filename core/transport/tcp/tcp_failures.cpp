// How a TcpNetwork notices lost peers, propagates errors, and ends.

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "transport/tcp/tcp_network.h"

namespace multiring::tcp {
namespace {

/// How long the other connections of a peer may still deliver after one was closed.
constexpr double kEndingSeconds = 1.0;
constexpr double kChecksPerHeartbeat = 10;
/// Seconds that the destructor waits for delivery after an error.
constexpr double kDelivery = 5.0;
constexpr double kDeliveryAfterAbort = 1.0;

/// Whether the host does not answer. Where one path of several is broken the control connection ends as well.
bool is_unreachable(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN ||
         error == ENETDOWN || error == ENONET;
}

}  // namespace

void TcpNetwork::check_timers() {
  drop_attempts([this](const ConnectAttempt& attempt) {
    return attempt.state == ConnectAttempt::State::kDone ||
           ((attempt.state == ConnectAttempt::State::kBackoff ||
             attempt.state == ConnectAttempt::State::kFailed) &&
            has_connection(attempt.info, attempt.info.server));
  });
  acceptor_.check_timers();
  check_heartbeats();
  learn_of_lost_ranks();
  if (ending_.empty()) return;
  const Clock::time_point now = Clock::now();
  std::erase_if(ending_, [&](int rank) {
    Peer& other = peer(rank);
    // If only data connections are closed, the goodbye may still arrive.
    const double limit = control_ended(other) ? kEndingSeconds : std::max(kEndingSeconds, options_.heartbeat);
    if (seconds_between(*other.ending, now) < limit) return false;
    other.dead = other.dead || !other.left;
    fail_pending(other);
    return true;
  });
}

void TcpNetwork::learn_of_lost_ranks() {
  const std::uint64_t version = options_.lost_ranks->version();
  if (version == std::exchange(lost_version_, version)) return;
  for (int rank = 0; rank < options_.size; ++rank) {
    Peer& other = peer(rank);
    if (rank == options_.rank || other.left || !options_.lost_ranks->contains(world_rank(rank))) continue;
    other.dead = true;
    fail_pending(other);
  }
}

void TcpNetwork::check_heartbeats() {
  const Clock::time_point now = Clock::now();
  if (now < next_check_) return;
  next_check_ = now + std::chrono::duration_cast<Clock::duration>(
                          std::chrono::duration<double>(options_.heartbeat / kChecksPerHeartbeat));
  for (Peer& other : peers_) check_heartbeats(other, now);
}

// A silent connection may just be slow: it gets more time as long as another one between the same addresses
// gets answers. The kernel sends no probes while data is unacknowledged, and waits for a quarter of an hour.
void TcpNetwork::check_heartbeats(Peer& other, Clock::time_point now) {
  struct Checked {
    TcpConnection* connection;
    TcpConnection::Silence silence;
    bool control;
  };
  std::vector<Checked> all;
  std::map<std::string, double> since_heard;  // by path
  const auto add = [&](TcpConnection* connection, bool control) {
    if (connection == nullptr || !connection->open()) return;
    all.push_back({connection, connection->silence(now), control});
    const double since = all.back().silence.since_heard;
    const auto [known, is_new] = since_heard.emplace(connection->path, since);
    if (!is_new) known->second = std::min(known->second, since);
  };
  add(other.control.get(), true);
  for (auto& [channel, stream] : other.streams)
    for (const auto& connection : stream->connections()) add(connection.get(), false);
  const double limit = options_.heartbeat;
  for (const Checked& one : all) {
    // The kernel probes the control connection every second: its last answer is as old as the silence.
    const double unanswered = one.control && one.silence.unanswered >= limit / 2 ? one.silence.since_answer
                                                                                 : one.silence.unanswered;
    const bool alive = since_heard.at(one.connection->path) < limit;
    if (unanswered >= limit * (alive ? TcpOptions::kSlowPathFactor : 1.0)) one.connection->expire();
  }
}

// Pending messages that a peer can no longer take or send are lost.
void TcpNetwork::fail_pending(Peer& peer) {
  // Data connections may be seen closed before the goodbye arrives.
  if (!peer.left && !peer.dead && !control_ended(peer)) return;
  for (auto& [channel, stream] : peer.streams) {
    if (!stream->sends_failed()) stream->fail_pending_sends();
    const auto connections = stream->connections();
    const bool ended = std::all_of(connections.begin(), connections.end(),
                                   [](const auto& connection) { return !connection || !connection->open(); });
    if ((ended || peer.dead) && !stream->receives_failed()) stream->fail_pending_receives();
  }
}

void TcpNetwork::on_closed(TcpConnection& connection, int error) {
  Peer& other = peer(connection.peer());
  const bool control = &connection == other.control.get();
  const bool orderly = error == 0 || error == ECONNRESET || error == EPIPE;
  const auto carries = [&](const auto& stream) {
    const auto connections = stream.second->connections();
    return stream.second->complete() &&
           std::any_of(connections.begin(), connections.end(),
                       [&](const auto& one) { return one.get() == &connection; });
  };
  // A peer whose `connect` failed may retry. The control connection tells whether it has ended.
  if (!control && orderly && std::none_of(other.streams.begin(), other.streams.end(), carries)) return;
  // The time of the others counts from the end of the control connection.
  if (control && other.ending) other.ending = Clock::now();
  if (!other.ending) {
    other.ending = Clock::now();
    ending_.push_back(connection.peer());
  }
  // The peer's kernel did not close it: nothing will come on the other connections either.
  if (!orderly) other.dead = true;
  if (control && is_unreachable(error)) options_.lost_ranks->add(world_rank(connection.peer()));
  fail_pending(other);
}

void TcpNetwork::on_fault(TcpConnection& connection, ErrorKind kind, const std::string& what) {
  const std::string host = known_host(connection.peer());
  propagate_abort({kind, options_.rank,
                   "rank " + std::to_string(world_rank(connection.peer())) +
                       (host.empty() ? "" : " on " + host) + " " + what},
                  nullptr);
}

void TcpNetwork::on_abort(TcpConnection& connection, const AbortRecord& record) {
  propagate_abort(record, &connection);
}

void TcpNetwork::on_goodbye(TcpConnection& connection) {
  Peer& other = peer(connection.peer());
  other.left = true;
  fail_pending(other);
}

void TcpNetwork::propagate_abort(const AbortRecord& record, const TcpConnection* from) {
  if (abort_) return;
  abort_ = record;
  const std::vector<std::byte> frame = encode_abort(record);
  for (Peer& other : peers_)
    if (other.control && other.control->open() && other.control.get() != from)
      other.control->send_frame(frame);
}

void TcpNetwork::abort(const Error& error) {
  relay({error.kind(), options_.rank, error.what(), error.context()});
}

void TcpNetwork::relay(const AbortRecord& record) {
  const std::lock_guard lock(mutex_);
  propagate_abort(record, nullptr);
  wake_waits();
}

bool TcpNetwork::aborted(AbortRecord* record) const {
  const std::lock_guard lock(mutex_);
  if (abort_ && record != nullptr) *record = *abort_;
  return abort_.has_value();
}

void TcpNetwork::leave() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(left_, true)) return;
  delivery_ = Deadline::after(std::min(abort_ ? kDeliveryAfterAbort : kDelivery, options_.heartbeat));
  acceptor_.stop_listening();
  drop_attempts([](const ConnectAttempt&) { return true; });
  const std::vector<std::byte> goodbye = encode_goodbye();
  for (Peer& other : peers_) {
    if (other.control && other.control->open()) other.control->send_frame(goodbye);
    // The control connection last: once it is closed, no goodbye can come.
    for (auto& [channel, stream] : other.streams)
      for (const auto& connection : stream->connections())
        if (connection) connection->end_output();
  }
  wake_waits();
}

// Peers take a rank that did not leave for dead.
TcpNetwork::~TcpNetwork() {
  if (left_) await_delivery();
}

// Of goodbyes and what was sent before them. A peer whose buffers are full delays this rank for a heartbeat
// at most; the kernel sends the rest later, unless the peer sends something, too.
void TcpNetwork::await_delivery() {
  std::vector<TcpConnection*> pending;
  for (int rank = 0; rank < options_.size; ++rank) {
    Peer& other = peer(rank);
    if (other.dead || options_.lost_ranks->contains(world_rank(rank))) continue;
    if (other.control) pending.push_back(other.control.get());
    for (auto& [channel, stream] : other.streams)
      for (const auto& connection : stream->connections())
        if (connection && !abort_)
          pending.push_back(connection.get());  // after an abort no rank reads messages
  }
  for (TcpConnection* connection : pending) connection->end_output();
  while (true) {
    const std::lock_guard lock(mutex_);
    check_heartbeats();  // hosts vanish with all of their ranks, which are found one after the other
    std::erase_if(pending, [this](TcpConnection* connection) {
      return connection->delivered() || options_.lost_ranks->contains(world_rank(connection->peer()));
    });
    if (pending.empty() || delivery_.expired()) return;
    ::poll(nullptr, 0, 1);
  }
}

}  // namespace multiring::tcp
