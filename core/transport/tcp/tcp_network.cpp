#include "transport/tcp/tcp_network.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cmath>

#include "transport/tcp/sockets.h"

namespace multiring::tcp {
namespace {

using Outcome = WaitResult::Outcome;

/// Longest sleep: then interrupts and clocks are looked at.
constexpr double kSlice = 0.05;
/// How long the other connections of a peer may take to show their end, or what they still carry, when one
/// has ended: a process closes all of them at once.
constexpr double kEndingSeconds = 1.0;
constexpr double kChecksPerHeartbeat = 10;
/// Seconds in which the end of a network waits for what is on its way, where an error has ended everything.
constexpr double kDeliveryAfterAbort = 1.0;

}  // namespace

WaitResult TcpNetwork::wait(std::span<const Ticket> tickets, const Waiting& waiting) {
  return drive(waiting, [&](WaitResult* result) { return judge_messages(tickets, result); });
}

WaitResult TcpNetwork::drive(const Waiting& waiting, const std::function<bool(WaitResult*)>& finished) {
  waiting.deadline.start();
  const Clock::time_point start = Clock::now();
  Clock::time_point looked = start;
  bool stall_told = waiting.stall_after <= 0 || waiting.stalled == nullptr;
  for (;;) {
    const Clock::time_point now = Clock::now();
    bool busy = false;
    {
      const std::lock_guard lock(mutex_);
      poller_.tell();
      work();
      look_at_clock();
      WaitResult result;
      if (finished(&result)) return result;
      busy = !work_.empty();
    }
    if (waiting.cancelled != nullptr && waiting.cancelled->load(std::memory_order_acquire))
      return {Outcome::kCancelled};
    if (waiting.deadline.expired()) return {Outcome::kTimeout};
    const double waited = seconds_between(start, now);
    if (seconds_between(looked, now) >= kSlice / 2) {
      looked = now;
      waiting.check_interrupt();
      if (!stall_told && waited >= waiting.stall_after) {
        stall_told = true;
        (*waiting.stalled)(waited);
      }
    }
    const bool spin = waiting.brief && waited * 1e6 < options_.spin_microseconds;
    const double sleep = std::min(kSlice, waiting.deadline.remaining());
    poller_.sleep(busy || spin ? 0 : static_cast<int>(std::ceil(sleep * 1000)));
  }
}

void TcpNetwork::progress() {
  poller_.sleep(0);
  const std::lock_guard lock(mutex_);
  poller_.tell();
  work();
  look_at_clock();
}

// One turn for each connection that stands in the queue; those that can move more stand in line again.
void TcpNetwork::work() {
  for (std::size_t turns = work_.size(); turns > 0; --turns) {
    TcpLink& link = *work_.front();
    work_.pop_front();
    link.queued = false;
    link.turn();
    if (link.can_move()) has_work(link);
  }
}

void TcpNetwork::has_work(TcpLink& link) {
  if (!link.queued) work_.push_back(&link);
  link.queued = true;
}

void TcpNetwork::look_at_clock() {
  drop_calls([this](const Call& call) {
    return call.state == Call::State::kDone ||
           (call.state == Call::State::kPause && stands(call.facts, call.facts.listener));
  });
  door_.look_at_clock();
  check_answers();
  if (ending_.empty()) return;
  const Clock::time_point now = Clock::now();
  std::erase_if(ending_, [&](int rank) {
    Peer& other = peer(rank);
    // Where data connections have ended alone, the goodbye that explains it may be on its way.
    const double limit = control_ended(other) ? kEndingSeconds : std::max(kEndingSeconds, options_.heartbeat);
    if (seconds_between(*other.ending, now) < limit) return false;
    other.dead = other.dead || !other.left;
    settle(other);
    return true;
  });
}

void TcpNetwork::check_answers() {
  const Clock::time_point now = Clock::now();
  if (now < next_check_) return;
  next_check_ = now + std::chrono::duration_cast<Clock::duration>(
                          std::chrono::duration<double>(options_.heartbeat / kChecksPerHeartbeat));
  for (Peer& other : peers_) check_answers(other, now);
}

// A connection of which nothing is heard may be stuck on a slow way, with its host alive: as long as any
// other one that goes the same way gets answers, it is given time. The kernel sends no probes where something
// is on its way, and gives up on that after a quarter of an hour.
void TcpNetwork::check_answers(Peer& other, Clock::time_point now) {
  struct Waiting {
    TcpLink* link;
    TcpLink::Silence silence;
    bool control;
  };
  std::vector<Waiting> all;
  std::map<std::string, double> since_heard;  // by path
  const auto look_at = [&](TcpLink* link, bool control) {
    if (link == nullptr || !link->open()) return;
    all.push_back({link, link->silence(now), control});
    const double since = all.back().silence.since_heard;
    const auto [known, is_new] = since_heard.emplace(link->path, since);
    if (!is_new) known->second = std::min(known->second, since);
  };
  look_at(other.control.get(), true);
  for (auto& [channel, stream] : other.streams)
    for (const auto& link : stream->links()) look_at(link.get(), false);
  const double limit = options_.heartbeat;
  for (const Waiting& one : all) {
    // On the control connection the kernel asks every second, so an answer is as old as the silence.
    const double owed =
        one.control && one.silence.owed >= limit / 2 ? one.silence.since_answer : one.silence.owed;
    const bool alive = since_heard.at(one.link->path) < limit;
    if (owed >= limit * (alive ? TcpOptions::kPatience : 1.0)) one.link->expire();
  }
}

bool TcpNetwork::judge_messages(std::span<const Ticket> tickets, WaitResult* result) {
  int lost_peer = -1;
  const Message* out_of_step = nullptr;
  bool all_done = true;
  for (const Ticket ticket : tickets) {
    const Message* message = messages_.find(ticket);
    if (message == nullptr)
      throw Error(ErrorKind::kInternal, "a wait for a message whose ticket was used up already");
    // A rank that left may have done so because another one died.
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
  if (out_of_step != nullptr)
    throw Error(ErrorKind::kInternal, "a wait for message " + std::to_string(out_of_step->sequence) +
                                          " on channel " + std::to_string(out_of_step->channel) +
                                          " between rank " + std::to_string(options_.rank) + " and rank " +
                                          std::to_string(out_of_step->peer) + ", of which rank " +
                                          std::to_string(options_.rank) + " gave up another one");
  return false;
}

// Decides what the ends of a peer's connections mean for what is pending.
void TcpNetwork::settle(Peer& peer) {
  // Data connections may show their end before the goodbye that went ahead of it is there.
  if (!peer.left && !peer.dead && !control_ended(peer)) return;
  for (auto& [channel, stream] : peer.streams) {
    if (!stream->sends_lost()) stream->lose_sends();
    const auto links = stream->links();
    const bool ended =
        std::all_of(links.begin(), links.end(), [](const auto& link) { return !link || !link->open(); });
    if ((ended || peer.dead) && !stream->receives_lost()) stream->lose_receives();
  }
}

void TcpNetwork::closed(TcpLink& link, int error) {
  Peer& other = peer(link.peer());
  const bool control = &link == other.control.get();
  const bool orderly = error == 0 || error == ECONNRESET || error == EPIPE;
  const auto carries = [&](const auto& stream) {
    const auto links = stream.second->links();
    return stream.second->complete() &&
           std::any_of(links.begin(), links.end(), [&](const auto& one) { return one.get() == &link; });
  };
  // Whoever gives up connecting may try again. That it has ended is told by its control connection.
  if (!control && orderly && std::none_of(other.streams.begin(), other.streams.end(), carries)) return;
  // The others are given their time from the end of the control connection on.
  if (control && other.ending) other.ending = Clock::now();
  if (!other.ending) {
    other.ending = Clock::now();
    ending_.push_back(link.peer());
  }
  // Anything but an end that the peer's kernel told of: no more will come of the other connections either.
  if (!orderly) other.dead = true;
  settle(other);
}

void TcpNetwork::fault(TcpLink& link, ErrorKind kind, const std::string& what) {
  const std::string host = known_host(link.peer());
  spread_abort(
      {kind, options_.rank,
       "rank " + std::to_string(world_rank(link.peer())) + (host.empty() ? "" : " on " + host) + " " + what},
      nullptr);
}

void TcpNetwork::heard_abort(TcpLink& link, const AbortRecord& record) { spread_abort(record, &link); }

void TcpNetwork::heard_goodbye(TcpLink& link) {
  Peer& other = peer(link.peer());
  other.left = true;
  settle(other);
}

void TcpNetwork::spread_abort(const AbortRecord& record, const TcpLink* from) {
  if (abort_) return;
  abort_ = record;
  const std::vector<std::byte> frame = encode_abort(record);
  for (Peer& other : peers_)
    if (other.control && other.control->open() && other.control.get() != from) other.control->say(frame);
}

void TcpNetwork::abort(ErrorKind kind, const std::string& message) { relay({kind, options_.rank, message}); }

void TcpNetwork::relay(const AbortRecord& record) {
  const std::lock_guard lock(mutex_);
  spread_abort(record, nullptr);
  poller_.wake();
}

bool TcpNetwork::aborted(AbortRecord* record) const {
  const std::lock_guard lock(mutex_);
  if (abort_ && record != nullptr) *record = *abort_;
  return abort_.has_value();
}

void TcpNetwork::leave() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(left_, true)) return;
  delivery_ =
      Deadline::after(abort_ ? std::min(kDeliveryAfterAbort, options_.heartbeat) : options_.heartbeat);
  door_.stop_listening();
  drop_calls([](const Call&) { return true; });
  const std::vector<std::byte> goodbye = encode_goodbye();
  for (Peer& other : peers_) {
    if (other.control && other.control->open()) other.control->say(goodbye);
    // The control connection last: its end means that no goodbye will come.
    for (auto& [channel, stream] : other.streams)
      for (const auto& link : stream->links())
        if (link) link->end_output();
  }
  poller_.wake();
}

// Whoever did not say goodbye is taken for dead.
TcpNetwork::~TcpNetwork() {
  if (left_) await_delivery();
}

// Of the goodbyes and what went ahead of them. A peer that has no room for it keeps this rank for a heartbeat
// at most; what is in the kernel then is sent later all the same, unless the peer sends something, too.
void TcpNetwork::await_delivery() {
  std::vector<TcpLink*> links;
  for (Peer& other : peers_) {
    if (other.dead) continue;
    if (other.control) links.push_back(other.control.get());
    for (auto& [channel, stream] : other.streams)
      for (const auto& link : stream->links())
        if (link && !abort_) links.push_back(link.get());  // after an abort nobody reads messages
  }
  for (TcpLink* link : links) link->end_output();
  while (true) {
    std::erase_if(links, [](TcpLink* link) { return link->delivered(); });
    if (links.empty() || delivery_.expired()) return;
    ::poll(nullptr, 0, 1);
  }
}

void TcpNetwork::abandon() { descriptors_.close_all(); }

void TcpNetwork::wake() { poller_.wake(); }

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
  for (const auto& link : to.links()) {
    if (!link->can_move()) continue;
    link->turn();
    if (link->can_move()) has_work(*link);
  }
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
  for (const auto& link : from.links())
    if (link->can_move()) has_work(*link);
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
    if (message->pending()) peer(message->peer).streams.at(message->channel)->stop();
    messages_.release(*message);
  }
}

WaitResult TcpNetwork::ended(int rank) const {
  const std::lock_guard lock(mutex_);
  const Peer& other = peer(rank);
  if (!other.left && !other.dead) return {};
  return {Outcome::kPeerLost, rank, other.left};
}

StrangerCounts TcpNetwork::strangers() const {
  const std::lock_guard lock(mutex_);
  return door_.strangers();
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
