#include "transport/cluster/remote_messages.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <string>
#include <thread>
#include <utility>

#include "transport/cluster/channels.h"
#include "transport/cluster/host_mirror.h"
#include "transport/rounds.h"
#include "transport/timed_wait.h"

namespace multiring {
namespace {

using Outcome = WaitResult::Outcome;

// How long the handling thread waits for its own message before it handles others, alone and with other
// threads waiting; and how often these check for their messages.
constexpr double kTimeSlice = 0.02;
constexpr double kSharedTimeSlice = 0.001;
constexpr std::chrono::microseconds kBetweenChecks(500);

struct Counted {
  std::atomic<int>& count;
  explicit Counted(std::atomic<int>& c) : count(c) { count.fetch_add(1, std::memory_order_relaxed); }
  ~Counted() { count.fetch_sub(1, std::memory_order_relaxed); }
};

}  // namespace

RemoteMessages::RemoteMessages(Network& network, int rank, const std::vector<int>& peers,
                               MailboxMemory memory)
    : network_(network),
      rank_(rank),
      memory_(std::move(memory)),
      peers_(std::make_shared<std::vector<Peer>>(static_cast<std::size_t>(network_.size()))) {
  network_.keep(peers_);
  for (const int each : peers) {
    peer(each).remote = true;
    if (!network_.links_on_demand()) open_link(each);
  }
}

std::array<Network::Link, 2> RemoteMessages::links_of(int peer) { return {{{peer, kChunks}, {peer, kAcks}}}; }

void RemoteMessages::open_link(int rank) {
  Peer& from = peer(rank);
  from.linked = true;
  post_header_receive(rank);
  post_ack_receive(rank);
  for (const auto& [chunk, bytes] : std::exchange(from.unsent, {})) post(rank, chunk, bytes);
}

bool RemoteMessages::linked(int rank) {
  const std::lock_guard lock(mutex_);
  return peer(rank).linked;
}

void RemoteMessages::open_new_links() {
  const std::uint64_t version = network_.links_version();
  if (version == std::exchange(links_version_, version)) return;
  for (std::size_t rank = 0; rank < peers_->size(); ++rank) {
    const int other = static_cast<int>(rank);
    if (!peer(other).remote || peer(other).linked) continue;
    if (std::ranges::all_of(links_of(other), [this](const auto& link) { return network_.linked(link); }))
      open_link(other);
  }
}

void RemoteMessages::post_header_receive(int source) {
  Peer& from = peer(source);
  from.has_header = false;
  from.chunk_receive = network_.post_receive(
      source, kChunks, {memory_.header(source, rank_, from.chunk), Rounds::kHeaderBytes});
}

void RemoteMessages::post_ack_receive(int destination) {
  Peer& from = peer(destination);
  from.ack_receive =
      network_.post_receive(destination, kAcks, {reinterpret_cast<std::byte*>(&from.ack), sizeof from.ack});
}

void RemoteMessages::send(int destination, std::uint64_t chunk, std::size_t bytes) {
  set_following_bytes(memory_.header(rank_, destination, chunk), bytes);
  const std::lock_guard lock(mutex_);
  if (!peer(destination).linked) return peer(destination).unsent.emplace_back(chunk, bytes), void();
  post(destination, chunk, bytes);
}

void RemoteMessages::post(int destination, std::uint64_t chunk, std::size_t bytes) {
  const std::span<const std::byte> head[] = {
      {memory_.header(rank_, destination, chunk), Rounds::kHeaderBytes}};
  const std::span<const std::byte> body[] = {{memory_.payload(rank_, destination, chunk), bytes}};
  std::vector<Ticket>& sends = peer(destination).sends;
  sends.push_back(network_.post_send(destination, kChunks, head));
  if (bytes > 0) sends.push_back(network_.post_send(destination, kChunks, body));
}

void RemoteMessages::acknowledge(int source, std::uint64_t chunk) {
  const std::lock_guard lock(mutex_);
  Peer& to = peer(source);
  // The one before the last has arrived: otherwise the peer would not have sent this chunk.
  std::uint64_t& ack = to.sent_acks[chunk % 2];
  ack = chunk;
  const std::span<const std::byte> parts[] = {{reinterpret_cast<const std::byte*>(&ack), sizeof ack}};
  to.sends.push_back(network_.post_send(source, kAcks, parts));
}

WaitResult RemoteMessages::await_chunk(int source, const std::function<bool()>& ready,
                                       const WaitOptions& waiting) {
  return await(source, ready, [this, source] { return std::vector{peer(source).chunk_receive}; }, waiting);
}

WaitResult RemoteMessages::await_ack(int destination, const std::function<bool()>& ready,
                                     const WaitOptions& waiting) {
  return await(
      destination, ready, [this, destination] { return std::vector{peer(destination).ack_receive}; },
      waiting);
}

WaitResult RemoteMessages::await_sent(int destination, const WaitOptions& waiting) {
  const auto left = [this, destination] {
    const std::lock_guard lock(mutex_);
    return peer(destination).sends.empty() && peer(destination).unsent.empty();
  };
  return await(destination, left, [this, destination] { return peer(destination).sends; }, waiting);
}

void RemoteMessages::poll() {
  if (const ProgressLock::Guard guard(progress_lock_); guard) handle_arrivals();
}

void RemoteMessages::leave() {
  const std::lock_guard lock(mutex_);
  left_ = true;
}

WaitResult RemoteMessages::await_any(AnySource& any, std::span<const int> remote,
                                     const WaitOptions& waiting) {
  return await([&any] { return any.ready(); },
               [&](const WaitOptions& slice) { return drive_any(any, remote, slice); }, waiting);
}

WaitResult RemoteMessages::await(int rank, const std::function<bool()>& ready,
                                 const std::function<std::vector<Ticket>()>& tickets,
                                 const WaitOptions& waiting) {
  return await(ready, [&](const WaitOptions& slice) { return drive(rank, tickets, slice); }, waiting);
}

WaitResult RemoteMessages::await(const std::function<bool()>& ready, const Drive& drive,
                                 const WaitOptions& waiting) {
  const Counted counted(waiting_);
  TimedWait timed(waiting);
  for (;;) {
    if (const ProgressLock::Guard guard(progress_lock_); guard) {
      handle_arrivals();
      if (ready()) return {};
      const bool alone = waiting_.load(std::memory_order_relaxed) == 1;
      const WaitResult result = drive(timed.slice(alone ? kTimeSlice : kSharedTimeSlice));
      if (!result.ok() && result.outcome != Outcome::kTimeout) return result;
      handle_arrivals();
    } else {
      std::this_thread::sleep_for(kBetweenChecks);
    }
    if (ready()) return {};
    if (waiting_.load(std::memory_order_relaxed) > 1)
      std::this_thread::sleep_for(kBetweenChecks);  // lets another thread drive
    if (network_.aborted(nullptr)) return {Outcome::kAborted};
    if (waiting.is_cancelled()) return {Outcome::kCancelled};
    if (timed.expired()) return {Outcome::kTimeout};
  }
}

/// A slice of the handling thread: makes the link, or waits for the first message that is not done.
WaitResult RemoteMessages::drive(int rank, const std::function<std::vector<Ticket>()>& tickets,
                                 const WaitOptions& slice) {
  if (!linked(rank)) {
    return network_.connect_on_demand(links_of(rank), slice);
  }
  std::unique_lock lock(mutex_);
  const std::vector<Ticket> wanted = tickets();
  lock.unlock();
  const auto pending =
      std::ranges::find_if(wanted, [this](Ticket ticket) { return ticket != 0 && !network_.done(ticket); });
  if (pending == wanted.end()) return {};
  const Ticket ticket = *pending;
  const WaitResult result = network_.wait({&ticket, 1}, slice);
  if (!result.ok()) return result;
  lock.lock();  // the ticket is released: 0 marks its message as done
  for (Peer& from : *peers_) {
    if (from.chunk_receive == ticket) from.chunk_receive = 0;
    if (from.ack_receive == ticket) from.ack_receive = 0;
    std::erase(from.sends, ticket);
  }
  return {};
}

/// The same for the first of several ranks that sends. Sources on this host write to memory, which no wait on
/// the network sees: the slice is short.
WaitResult RemoteMessages::drive_any(AnySource& any, std::span<const int> remote, const WaitOptions& slice) {
  const auto brief = [&slice] {
    WaitOptions options = slice;
    options.deadline = Deadline::after(std::min(kSharedTimeSlice, slice.deadline.remaining()));
    return options;
  };
  if (const WaitResult ended = find_ended(any, remote); !ended.ok()) return ended;
  std::vector<Network::Link> missing;
  std::vector<Ticket> wanted;
  {
    const std::lock_guard lock(mutex_);
    for (const int rank : remote) {
      if (any.has_left(rank) || !any.is_silent(rank)) continue;
      if (peer(rank).linked)
        wanted.push_back(peer(rank).chunk_receive);
      else if (!any.is_gone(rank) && !any.is_unreachable(rank))
        std::ranges::copy(links_of(rank), std::back_inserter(missing));
    }
  }
  if (!missing.empty()) {
    const WaitResult result = connect_any(any, missing, brief());
    if (!result.ok() && result.outcome != Outcome::kTimeout) return result;
    if (wanted.empty()) return {};
  }
  const WaitResult result = network_.wait_any(wanted, brief());
  return result.outcome == Outcome::kPeerLost ? any.note_end(result) : result;
}

// One whose message was told, and not received, has no receive that fails; nor has one without a link.
WaitResult RemoteMessages::find_ended(AnySource& any, std::span<const int> remote) {
  for (const int rank : remote) {
    if (any.has_left(rank) || (any.is_silent(rank) && !any.is_gone(rank) && !any.is_unreachable(rank)))
      continue;
    WaitResult ended = network_.ended(rank);
    if (!ended.ok()) ended = any.note_end(ended);
    if (!ended.ok()) return ended;
  }
  return any.gone_for_long();
}

WaitResult RemoteMessages::connect_any(AnySource& any, std::span<const Network::Link> missing,
                                       const WaitOptions& slice) {
  try {
    const WaitResult result = network_.connect_on_demand(missing, slice);
    return result.outcome == Outcome::kPeerLost ? any.note_end(result) : result;
  } catch (const Error& error) {
    const int source = error.context().peer;
    if (std::ranges::find(missing, source, &Network::Link::peer) == missing.end()) throw;
    any.note_unreachable(source, error);
    return {};
  }
}

/// Whether a message is done; 0: one whose ticket is released.
bool RemoteMessages::release_if_done(Ticket ticket) {
  if (ticket == 0) return true;
  if (!network_.done(ticket)) return false;
  network_.give_up({&ticket, 1});
  return true;
}

void RemoteMessages::handle_arrivals() {
  const std::lock_guard lock(mutex_);
  if (left_) return;
  open_new_links();
  for (std::size_t rank = 0; rank < peers_->size(); ++rank) {
    Peer& from = (*peers_)[rank];
    if (!from.linked) continue;
    const int other = static_cast<int>(rank);
    while (release_if_done(from.chunk_receive)) handle_chunk(other);
    while (release_if_done(from.ack_receive)) {
      memory_.on_read(other, from.ack);
      post_ack_receive(other);
    }
    std::erase_if(from.sends, [this](Ticket ticket) { return release_if_done(ticket); });
  }
}

void RemoteMessages::handle_chunk(int source) {
  Peer& from = peer(source);
  if (!from.has_header) {
    const std::uint64_t bytes = following_bytes(memory_.header(source, rank_, from.chunk));
    if (bytes > memory_.chunk_bytes)
      throw Error(ErrorKind::kInternal, "rank " + std::to_string(source) + " sends a chunk of " +
                                            std::to_string(bytes) + " bytes, more than the " +
                                            std::to_string(memory_.chunk_bytes) + " of a mailbox");
    if (bytes > 0) {
      from.chunk_receive =
          network_.post_receive(source, kChunks, {memory_.payload(source, rank_, from.chunk), bytes});
      from.has_header = true;
      return;
    }
  }
  memory_.on_written(source, from.chunk);
  ++from.chunk;
  post_header_receive(source);
}

}  // namespace multiring
