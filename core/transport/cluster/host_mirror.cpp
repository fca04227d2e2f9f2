#include "transport/cluster/host_mirror.h"

#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <utility>

namespace multiring {

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
  for (Source& source : sources_) {
    take_in();
    while (source.expected != 0) {
      awaited_ = source.expected;
      const WaitResult result = wait({&awaited_, 1}, waiting);
      awaited_ = 0;
      if (!result.ok()) return result;
      advance(source);
    }
  }
  const WaitResult result = wait(sends_, waiting);
  if (result.ok()) sends_.clear();
  return result;
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
  for (Source& source : sources_)
    while (source.expected != 0 && source.expected != awaited_ && network_->done(source.expected)) {
      network_->give_up({&source.expected, 1});
      advance(source);
    }
}

void HostMirror::look() {
  if (const DriverSeat::Ride ride(seat_); ride) network_->progress();
}

WaitResult HostMirror::wait(std::span<const Ticket> tickets, const Waiting& waiting) {
  for (;;) {
    if (const DriverSeat::Ride ride(seat_); ride) return network_->wait(tickets, waiting);
    std::this_thread::yield();  // to a thread that looks, which is short
  }
}

}  // namespace multiring
