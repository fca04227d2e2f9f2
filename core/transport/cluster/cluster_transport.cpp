#include "transport/cluster/cluster_transport.h"

#include <algorithm>
#include <iterator>
#include <set>

namespace multiring {

std::string ClusterTransport::host(int rank) const { return info(rank).host_name; }

std::int64_t ClusterTransport::process_id(int rank) const { return info(rank).process_id; }

// Data that is missing here should have come to one of this host's ranks from a rank of another host. If both
// have reached the round, the sender waits for another rank itself, or is stopped.
Stragglers ClusterTransport::stragglers(std::uint64_t round) const {
  std::set<int> late;
  std::set<int> unknown;
  std::set<int> forwarding;
  const auto is_late = [&](int rank) { return !has_reached(rank, round); };
  const auto add_late = [&](std::set<int>& to, const MirrorMessage& message) {
    std::ranges::copy_if(message.ranks, std::inserter(to, to.end()), is_late);
  };
  const auto check = [&](int here, const MirrorMessage& message) {
    const auto is_here = [&](int rank) { return arrived(rank) >= round; };
    if (std::ranges::all_of(message.ranks, is_here)) return;
    for (const int end : {here, message.peer}) {
      if (!is_late(end)) continue;
      late.insert(end);
      return add_late(unknown, message);
    }
    if (std::ranges::any_of(message.ranks, is_late)) return add_late(late, message);
    forwarding.insert(message.peer);
    if (here != rank()) forwarding.insert(here);  // it may have stopped before it handled the message
  };
  for (const auto& [here, routes] : host_routes()) {
    if (is_late(here)) late.insert(here);
    for (const MirrorStep& step : routes.steps)
      for (const MirrorMessage& message : step.in) check(here, message);
  }
  for (const int rank : late) unknown.erase(rank);
  return {
      {late.begin(), late.end()}, {unknown.begin(), unknown.end()}, {forwarding.begin(), forwarding.end()}};
}

// This host notices the end of a rank only if one of its ranks receives from it.
bool ClusterTransport::is_watched(int rank) const {
  if (!is_remote(rank)) return true;
  for (const auto& [here, routes] : host_routes())
    for (const MirrorStep& step : routes.steps)
      if (std::ranges::find(step.in, rank, &MirrorMessage::peer) != step.in.end()) return true;
  return false;
}

void ClusterTransport::arrive(std::uint64_t round, std::size_t staged) {
  SharedTransport::arrive(round, staged);
  mirror_->post(rank(), round, staged);
}

WaitResult ClusterTransport::await_all(std::uint64_t round, const WaitOptions& waiting) {
  const auto find_failure = [this, round] {
    mirror_->handle_arrivals();
    return find_lost(round);
  };
  // Warnings and errors list the ranks that have arrived.
  const std::function<void(double)> stalled = [&](double waited) {
    mirror_->handle_arrivals();
    (*waiting.stalled)(waited);
  };
  const auto await_messages = [&](const WaitOptions& watched) {
    WaitOptions updating = watched;
    if (waiting.stalled != nullptr) updating.stalled = &stalled;
    const WaitResult result = mirror_->await(updating);
    if (!result.ok()) mirror_->handle_arrivals();
    return result;
  };
  const WaitResult mirrored = wait_on_network(waiting, await_messages, find_failure);
  if (!mirrored.ok()) return mirrored;
  // This rank has received and forwarded its messages. It goes on with gossip while it waits for others.
  const Clock::time_point start = Clock::now();
  const std::function<void()> gossip = [&] {
    waiting.check_interrupt();
    mirror_->handle_arrivals();
    if (seconds_between(start, Clock::now()) >= HostMirror::kTimeSlice) mirror_->gossip();
  };
  const WaitOptions gossiping = waiting.with_interrupt(gossip);
  return wait_on_memory(gossiping,
                        [&](const WaitOptions& here) { return SharedTransport::await_all(round, here); });
}

WaitResult ClusterTransport::wait_on_memory(const WaitOptions& waiting,
                                            const std::function<WaitResult(const WaitOptions&)>& wait) const {
  const std::function<void()> check = [&] {
    waiting.check_interrupt();
    poll();
  };
  const WaitOptions here = waiting.with_interrupt(check);
  const WaitResult result = wait(here);
  if (!result.ok()) poll();
  return result;
}

WaitResult ClusterTransport::wait_on_network(const WaitOptions& waiting,
                                             const std::function<WaitResult(const WaitOptions&)>& wait,
                                             const std::function<WaitResult()>& find_failure) {
  const std::function<void()> check = [&] {
    waiting.check_interrupt();
    poll();
    if (SharedTransport::aborted(nullptr)) throw WaitEnded{{WaitResult::Outcome::kAborted}};
    if (!find_failure) return;
    if (const WaitResult found = find_failure(); !found.ok()) throw WaitEnded{found};
  };
  const WaitOptions watched = waiting.with_interrupt(check);
  WaitResult result;
  try {
    result = wait(watched);
  } catch (const WaitEnded& ended) {
    result = ended.result;
  }
  if (result.ok()) return result;
  poll();  // a peer may be seen to end before its error arrives
  return SharedTransport::aborted(nullptr) ? WaitResult{WaitResult::Outcome::kAborted} : result;
}

void ClusterTransport::poll() const {
  poll_own();
  context_->progress->poll();
}

void ClusterTransport::poll_own() const {
  network_->progress();
  messages_->poll();
  AbortRecord record;
  if (network_->aborted(&record)) publish_abort(record.kind, record.origin, record.message, record.about);
  // Not every rank that this one is connected with is connected with the origin.
  if (SharedTransport::aborted(&record) && !relayed_.exchange(true)) network_->relay(record);
}

void ClusterTransport::mailbox_written(int destination, std::uint64_t chunk, std::size_t bytes) {
  if (!is_remote(destination)) return SharedTransport::mailbox_written(destination, chunk, bytes);
  messages_->send(destination, chunk, bytes);
}

void ClusterTransport::mailbox_read(int source, std::uint64_t chunk) {
  if (!is_remote(source)) return SharedTransport::mailbox_read(source, chunk);
  messages_->acknowledge(source, chunk);
}

WaitResult ClusterTransport::await_written(int source, std::uint64_t chunk, const WaitOptions& waiting) {
  if (!is_remote(source))
    return wait_on_memory(waiting, [&](const WaitOptions& here) {
      return SharedTransport::await_written(source, chunk, here);
    });
  const std::atomic<std::uint64_t>& written = mailbox(source, rank()).written;
  const auto ready = [&] { return written.load(std::memory_order_acquire) >= chunk; };
  return wait_on_network(
      waiting, [&](const WaitOptions& watched) { return messages_->await_chunk(source, ready, watched); });
}

WaitResult ClusterTransport::await_any(AnySource& any, const WaitOptions& waiting) {
  std::vector<int> remote;
  std::ranges::copy_if(any.sources(), std::back_inserter(remote),
                       [this](int rank) { return is_remote(rank); });
  if (remote.empty())
    return wait_on_memory(waiting,
                          [&](const WaitOptions& here) { return SharedTransport::await_any(any, here); });
  return wait_on_network(
      waiting, [&](const WaitOptions& watched) { return messages_->await_any(any, remote, watched); },
      [&] { return find_lost_source(any); });
}

WaitResult ClusterTransport::await_read(int destination, std::uint64_t chunk, const WaitOptions& waiting) {
  if (!is_remote(destination))
    return wait_on_memory(waiting, [&](const WaitOptions& here) {
      return SharedTransport::await_read(destination, chunk, here);
    });
  const std::atomic<std::uint64_t>& read = mailbox(rank(), destination).read;
  const auto ready = [&] { return read.load(std::memory_order_acquire) >= chunk; };
  if (ready()) return {};
  return wait_on_network(
      waiting, [&](const WaitOptions& watched) { return messages_->await_ack(destination, ready, watched); });
}

WaitResult ClusterTransport::await_sent(int destination, const WaitOptions& waiting) {
  if (!is_remote(destination)) return {};
  return wait_on_network(
      waiting, [&](const WaitOptions& watched) { return messages_->await_sent(destination, watched); });
}

WaitResult ClusterTransport::find_ended() const {
  WaitResult found = SharedTransport::find_ended();
  for (const int other : remote_) {
    const WaitResult ended = network_->ended(other);
    if (!ended.ok() && (found.ok() || (found.peer_left && !ended.peer_left))) found = ended;
  }
  return found;
}

// An error that has arrived from another host comes first. A network that fails must not keep the ranks of
// this host from learning of the error.
void ClusterTransport::abort(const Error& error) noexcept {
  const auto attempt = [](const auto& part) {
    try {
      part();
    } catch (...) {
    }
  };
  attempt([&] { aborted(nullptr); });
  SharedTransport::abort(error);
  if (network_ != nullptr) attempt([&] { network_->abort(error); });
}

bool ClusterTransport::aborted(AbortRecord* record) const {
  if (messages_ != nullptr) poll();
  return SharedTransport::aborted(record);
}

void ClusterTransport::leave() {
  SharedTransport::leave();
  if (mirror_ != nullptr) mirror_->leave();
  if (messages_ != nullptr) messages_->leave();
  if (network_ != nullptr) network_->leave();
  if (hierarchy_ != nullptr) hierarchy_->leave();
}

void ClusterTransport::abandon() {
  SharedTransport::abandon();
  network_->abandon();
  hierarchy_->abandon();
}

void ClusterTransport::wake() {
  SharedTransport::wake();
  network_->wake();
  hierarchy_->wake();
}

}  // namespace multiring
