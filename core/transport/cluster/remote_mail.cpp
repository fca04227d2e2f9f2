#include "transport/cluster/remote_mail.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "transport/cluster/host_mirror.h"
#include "transport/cluster/patience.h"

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
    expect_header(each);
    expect_answer(each);
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
  std::byte* header = memory_.header(rank_, destination, chunk);
  set_following_bytes(header, bytes);
  const std::span<const std::byte> head[] = {{header, Transport::kHeaderBytes}};
  const std::span<const std::byte> body[] = {{memory_.payload(rank_, destination, chunk), bytes}};
  const std::lock_guard lock(mutex_);
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
  return await(ready, [this, source] { return std::vector{peer(source).incoming}; }, waiting);
}

WaitResult RemoteMail::await_answer(int destination, const std::function<bool()>& ready,
                                    const Waiting& waiting) {
  return await(ready, [this, destination] { return std::vector{peer(destination).answering}; }, waiting);
}

WaitResult RemoteMail::await_sent(int destination, const Waiting& waiting) {
  const auto left = [this, destination] {
    const std::lock_guard lock(mutex_);
    return peer(destination).sends.empty();
  };
  return await(left, [this, destination] { return peer(destination).sends; }, waiting);
}

void RemoteMail::look() {
  if (const DriverSeat::Ride ride(seat_); ride) {
    network_->progress();
    take_in();
  }
}

void RemoteMail::leave() {
  const std::lock_guard lock(mutex_);
  left_ = true;
  network_->leave();
}

/// `tickets`: what to wait for, of messages that are not done; under `mutex_`.
WaitResult RemoteMail::await(const std::function<bool()>& ready,
                             const std::function<std::vector<Ticket>()>& tickets, const Waiting& waiting) {
  const Counted counted(waiting_);
  Patience patience(waiting);
  for (;;) {
    if (const DriverSeat::Ride ride(seat_); ride) {
      take_in();
      if (ready()) return {};
      std::unique_lock lock(mutex_);
      const std::vector<Ticket> wanted = tickets();
      lock.unlock();
      const bool alone = waiting_.load(std::memory_order_relaxed) == 1;
      const Waiting turn = patience.turn(alone ? kTurn : kTurnAmongOthers);
      for (const Ticket ticket : wanted) {
        if (ticket == 0 || network_->done(ticket)) continue;
        const WaitResult result = network_->wait({&ticket, 1}, turn);
        if (!result.ok() && result.outcome != Outcome::kTimeout) return result;
        if (result.ok()) {  // used up: what it was has to be taken in by hand
          lock.lock();
          for (std::size_t other = 0; other < peers_->size(); ++other) {
            Peer& from = (*peers_)[other];
            if (from.incoming == ticket) from.incoming = 0;
            if (from.answering == ticket) from.answering = 0;
            std::erase(from.sends, ticket);
          }
          lock.unlock();
        }
        break;
      }
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
  for (std::size_t rank = 0; rank < peers_->size(); ++rank) {
    Peer& from = (*peers_)[rank];
    if (!from.remote) continue;
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
