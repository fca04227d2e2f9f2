#include "transport/cluster/remote_messages.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "transport/cluster/host_mirror.h"
#include "transport/timed_wait.h"

namespace multiring {
namespace {

using Outcome = WaitResult::Outcome;

constexpr int kChunks = 0, kAnswers = 1;  // channels

// How long the driver looks at its own messages before it takes in the others, and how often a thread looks
// whether the driver has taken in what it waits for, or has gone.
constexpr double kTurn = 0.02;
constexpr double kTurnAmongOthers = 0.001;
constexpr std::chrono::microseconds kLook(500);

struct Counted {
  std::atomic<int>& count;
  explicit Counted(std::atomic<int>& c) : count(c) { count.fetch_add(1, std::memory_order_relaxed); }
  ~Counted() { count.fetch_sub(1, std::memory_order_relaxed); }
};

}  // namespace

RemoteMail::RemoteMail(std::unique_ptr<Network> network, int rank, const std::vector<int>& peers,
                       MailMemory memory)
    : network_(std::move(network)),
      rank_(rank),
      memory_(std::move(memory)),
      peers_(std::make_shared<std::vector<Peer>>(static_cast<std::size_t>(network_->size()))) {
  network_->keep(peers_);
  for (const int each : peers) {
    peer(each).remote = true;
    if (!network_->links_on_demand()) start(each);
  }
}

void RemoteMail::start(int rank) {
  Peer& from = peer(rank);
  from.linked = true;
  expect_header(rank);
  expect_answer(rank);
  for (const auto& [chunk, bytes] : std::exchange(from.unsent, {})) post(rank, chunk, bytes);
}

bool RemoteMail::linked(int rank) {
  const std::lock_guard lock(mutex_);
  return peer(rank).linked;
}

void RemoteMail::welcome() {
  const std::uint64_t arrivals = network_->arrivals();
  if (arrivals == std::exchange(arrivals_, arrivals)) return;
  for (std::size_t rank = 0; rank < peers_->size(); ++rank) {
    const int other = static_cast<int>(rank);
    if (!peer(other).remote || peer(other).linked) continue;
    if (network_->linked({other, kChunks}) && network_->linked({other, kAnswers})) start(other);
  }
}

void RemoteMail::expect_header(int source) {
  Peer& from = peer(source);
  from.body = false;
  from.incoming = network_->post_receive(
      source, kChunks, {memory_.header(source, rank_, from.chunk), Transport::kHeaderBytes});
}

void RemoteMail::expect_answer(int destination) {
  Peer& from = peer(destination);
  from.answering = network_->post_receive(destination, kAnswers,
                                          {reinterpret_cast<std::byte*>(&from.answer), sizeof from.answer});
}

void RemoteMail::send(int destination, std::uint64_t chunk, std::size_t bytes) {
  set_following_bytes(memory_.header(rank_, destination, chunk), bytes);
  const std::lock_guard lock(mutex_);
  if (!peer(destination).linked) return peer(destination).unsent.emplace_back(chunk, bytes), void();
  post(destination, chunk, bytes);
}

void RemoteMail::post(int destination, std::uint64_t chunk, std::size_t bytes) {
  const std::span<const std::byte> head[] = {
      {memory_.header(rank_, destination, chunk), Transport::kHeaderBytes}};
  const std::span<const std::byte> body[] = {{memory_.payload(rank_, destination, chunk), bytes}};
  std::vector<Ticket>& sends = peer(destination).sends;
  sends.push_back(network_->post_send(destination, kChunks, head));
  if (bytes > 0) sends.push_back(network_->post_send(destination, kChunks, body));
}

void RemoteMail::answer(int source, std::uint64_t chunk) {
  const std::lock_guard lock(mutex_);
  Peer& to = peer(source);
  // The answer before the last has arrived: without it the peer had not sent this chunk.
  std::uint64_t& place = to.answers[chunk % 2];
  place = chunk;
  const std::span<const std::byte> parts[] = {{reinterpret_cast<const std::byte*>(&place), sizeof place}};
  to.sends.push_back(network_->post_send(source, kAnswers, parts));
}

WaitResult RemoteMail::await_chunk(int source, const std::function<bool()>& ready, const Waiting& waiting) {
  return await(source, ready, [this, source] { return std::vector{peer(source).incoming}; }, waiting);
}

WaitResult RemoteMail::await_answer(int destination, const std::function<bool()>& ready,
                                    const Waiting& waiting) {
  return await(
      destination, ready, [this, destination] { return std::vector{peer(destination).answering}; }, waiting);
}

WaitResult RemoteMail::await_sent(int destination, const Waiting& waiting) {
  const auto left = [this, destination] {
    const std::lock_guard lock(mutex_);
    return peer(destination).sends.empty() && peer(destination).unsent.empty();
  };
  return await(destination, left, [this, destination] { return peer(destination).sends; }, waiting);
}

void RemoteMail::look() {
  if (const DriverSeat::Ride ride(seat_); ride) {
    network_->progress();
    take_in();
  }
}

void RemoteMail::leave() {
  {
    const std::lock_guard lock(mutex_);
    left_ = true;
  }
  network_->leave();  // which may take its time; who looks is not to wait for it
}

/// `tickets`: what to wait for, of messages that are not done; under `mutex_`.
WaitResult RemoteMail::await(int rank, const std::function<bool()>& ready,
                             const std::function<std::vector<Ticket>()>& tickets, const Waiting& waiting) {
  const Counted counted(waiting_);
  Patience patience(waiting);
  for (;;) {
    if (const DriverSeat::Ride ride(seat_); ride) {
      take_in();
      if (ready()) return {};
      const bool alone = waiting_.load(std::memory_order_relaxed) == 1;
      const WaitResult result = drive(rank, tickets, patience.turn(alone ? kTurn : kTurnAmongOthers));
      if (!result.ok() && result.outcome != Outcome::kTimeout) return result;
      take_in();
    } else {
      std::this_thread::sleep_for(kLook);
    }
    if (ready()) return {};
    if (waiting_.load(std::memory_order_relaxed) > 1) std::this_thread::sleep_for(kLook);  // another's turn
    if (network_->aborted(nullptr)) return {Outcome::kAborted};
    if (waiting.cancelled != nullptr && waiting.cancelled->load(std::memory_order_acquire))
      return {Outcome::kCancelled};
    if (patience.is_over()) return {Outcome::kTimeout};
  }
}

/// One turn of whoever moves the messages: makes the link, or waits for the first message that is not done.
WaitResult RemoteMail::drive(int rank, const std::function<std::vector<Ticket>()>& tickets,
                             const Waiting& turn) {
  if (!linked(rank)) {
    const Network::Link links[] = {{rank, kChunks}, {rank, kAnswers}};
    return network_->reach(links, turn);
  }
  std::unique_lock lock(mutex_);
  const std::vector<Ticket> wanted = tickets();
  lock.unlock();
  const auto pending =
      std::ranges::find_if(wanted, [this](Ticket ticket) { return ticket != 0 && !network_->done(ticket); });
  if (pending == wanted.end()) return {};
  const Ticket ticket = *pending;
  const WaitResult result = network_->wait({&ticket, 1}, turn);
  if (!result.ok()) return result;
  lock.lock();  // used up: what it was has to be taken in by hand
  for (Peer& from : *peers_) {
    if (from.incoming == ticket) from.incoming = 0;
    if (from.answering == ticket) from.answering = 0;
    std::erase(from.sends, ticket);
  }
  return {};
}

/// Whether a message is there; uses its ticket up then. 0: one that was used up.
bool RemoteMail::arrived(Ticket ticket) {
  if (ticket == 0) return true;
  if (!network_->done(ticket)) return false;
  network_->give_up({&ticket, 1});
  return true;
}

void RemoteMail::take_in() {
  const std::lock_guard lock(mutex_);
  if (left_) return;
  welcome();
  for (std::size_t rank = 0; rank < peers_->size(); ++rank) {
    Peer& from = (*peers_)[rank];
    if (!from.linked) continue;
    const int other = static_cast<int>(rank);
    while (arrived(from.incoming)) take_chunk(other);
    while (arrived(from.answering)) {
      memory_.was_read(other, from.answer);
      expect_answer(other);
    }
    retire_sends(from);
  }
}

void RemoteMail::take_chunk(int source) {
  Peer& from = peer(source);
  if (!from.body) {
    const std::uint64_t bytes = following_bytes(memory_.header(source, rank_, from.chunk));
    if (bytes > memory_.chunk_bytes)
      throw Error(ErrorKind::kInternal, "rank " + std::to_string(source) + " sends a chunk of " +
                                            std::to_string(bytes) + " bytes, more than the " +
                                            std::to_string(memory_.chunk_bytes) + " of a mailbox");
    if (bytes > 0) {
      from.incoming =
          network_->post_receive(source, kChunks, {memory_.payload(source, rank_, from.chunk), bytes});
      from.body = true;
      return;
    }
  }
  memory_.came(source, from.chunk);
  ++from.chunk;
  expect_header(source);
}

void RemoteMail::retire_sends(Peer& peer) {
  std::erase_if(peer.sends, [this](Ticket ticket) { return arrived(ticket); });
}

}  // namespace multiring
