#include "transport/cluster/host_mirror.h"

#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "transport/cluster/patience.h"

namespace multiring {
namespace {

constexpr double kTurn = 0.02;  // seconds

}  // namespace

void set_following_bytes(std::byte* header, std::uint64_t bytes) {
  std::memcpy(header + Transport::kUserHeaderBytes, &bytes, sizeof bytes);
}

std::uint64_t following_bytes(const std::byte* header) {
  std::uint64_t bytes = 0;
  std::memcpy(&bytes, header + Transport::kUserHeaderBytes, sizeof bytes);
  return bytes;
}

HostMirror::HostMirror(std::unique_ptr<Network> network, const std::vector<int>& targets,
                       const std::vector<int>& sources, RoundMemory memory)
    : network_(std::move(network)), targets_(targets), memory_(std::move(memory)) {
  for (const int source : sources) sources_.push_back({source});
}

std::vector<int> HostMirror::partners() const {
  std::set<int> ranks(targets_.begin(), targets_.end());
  for (const Source& source : sources_) ranks.insert(source.rank);
  return {ranks.begin(), ranks.end()};
}

void HostMirror::post(int rank, std::uint64_t round, std::size_t staged) {
  round_ = round;
  std::byte* header = memory_.header(rank, round);
  set_following_bytes(header, staged);
  const std::span<const std::byte> head[] = {{header, Transport::kHeaderBytes}};
  const std::span<const std::byte> body[] = {{memory_.staging(rank, round), staged}};
  for (const int target : targets_) {
    sends_.push_back(network_->post_send(target, 0, head));
    if (staged > 0) sends_.push_back(network_->post_send(target, 0, body));
  }
  for (Source& source : sources_) {
    source.body = false;
    source.expected =
        network_->post_receive(source.rank, 0, {memory_.header(source.rank, round), Transport::kHeaderBytes});
  }
}

WaitResult HostMirror::await(const Waiting& waiting) {
  Patience patience(waiting);
  // A turn for each: whoever is lost is found though others are slow.
  for (std::size_t next = 0;; ++next) {
    take_in();
    std::vector<Source*> pending;
    for (Source& source : sources_)
      if (source.expected != 0) pending.push_back(&source);
    const Waiting turn = patience.turn(kTurn);
    const std::size_t index = next % (pending.size() + 1);
    WaitResult result;
    if (index == pending.size()) {
      result = wait(sends_, turn);
      if (result.ok()) sends_.clear();
    } else {
      awaited_ = pending[index]->expected;
      result = wait({&awaited_, 1}, turn);
      awaited_ = 0;
      if (result.ok()) advance(*pending[index]);
    }
    if (result.ok() && pending.empty()) return {};
    if (!result.ok() && result.outcome != WaitResult::Outcome::kTimeout) return result;
    if (patience.is_over()) return {WaitResult::Outcome::kTimeout};
  }
}

/// What `source` was expected to send is there, and its ticket is used up.
void HostMirror::advance(Source& source) {
  source.expected = 0;
  const std::uint64_t bytes = source.body ? 0 : following_bytes(memory_.header(source.rank, round_));
  if (bytes > memory_.staging_bytes)
    throw Error(ErrorKind::kInternal, "rank " + std::to_string(source.rank) + " sends " +
                                          std::to_string(bytes) + " bytes in a round of at most " +
                                          std::to_string(memory_.staging_bytes));
  if (bytes == 0) return memory_.arrived(source.rank, round_);
  source.body = true;
  source.expected = network_->post_receive(source.rank, 0, {memory_.staging(source.rank, round_), bytes});
}

// Not only from the rank that is waited for: the others of this host wait for the rest, and errors tell who
// has come.
void HostMirror::take_in() {
  if (left_.load(std::memory_order_relaxed)) return;
  for (Source& source : sources_)
    while (source.expected != 0 && source.expected != awaited_ && network_->done(source.expected)) {
      network_->give_up({&source.expected, 1});
      advance(source);
    }
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
