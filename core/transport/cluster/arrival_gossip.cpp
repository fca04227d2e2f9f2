#include "transport/cluster/arrival_gossip.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

namespace multiring {
namespace {

constexpr int kBits = 8;

std::byte bit(int rank) { return std::byte{1} << (rank % kBits); }
std::size_t index(int rank) { return static_cast<std::size_t>(rank / kBits); }

}  // namespace

ArrivalGossip::ArrivalGossip(Network& network, int channel, const std::set<int>& neighbours,
                             Callbacks callbacks)
    : network_(network),
      channel_(channel),
      callbacks_(std::move(callbacks)),
      known_(index(network.size() - 1) + 1),
      memory_(std::make_shared<std::vector<std::byte>>((1 + 2 * neighbours.size()) * bytes())) {
  std::size_t offset = bytes();
  for (const int peer : neighbours) {
    Neighbour& neighbour = neighbours_.emplace_back();
    neighbour.peer = peer;
    neighbour.output = offset;
    neighbour.input = offset + bytes();
    offset += 2 * bytes();
  }
  network_.keep(memory_);
}

void ArrivalGossip::start() {
  for (Neighbour& neighbour : neighbours_)
    if (neighbour.receive == 0) post_receive(neighbour);
}

void ArrivalGossip::post_receive(Neighbour& neighbour) {
  neighbour.receive =
      network_.post_receive(neighbour.peer, channel_, {memory_->data() + neighbour.input, bytes()});
}

void ArrivalGossip::send(std::uint64_t round) {
  std::ranges::fill(known_, std::byte{0});
  int known = 0;
  for (int rank = 0; rank < network_.size(); ++rank) {
    if (!callbacks_.has_reached(rank, round)) continue;
    known_[index(rank)] |= bit(rank);
    ++known;
  }
  for (Neighbour& neighbour : neighbours_) send(neighbour, round, known);
}

void ArrivalGossip::send(Neighbour& neighbour, std::uint64_t round, int known) {
  if (!neighbour.acknowledged || (neighbour.round == round && neighbour.known == known)) return;
  if (neighbour.send != 0) {
    if (!network_.done(neighbour.send)) return;
    network_.give_up({&neighbour.send, 1});
  }
  std::byte* const message = memory_->data() + neighbour.output;
  std::memcpy(message, &round, sizeof round);
  std::memcpy(message + sizeof round, known_.data(), known_.size());
  const std::span<const std::byte> parts[] = {{message, bytes()}};
  neighbour.send = network_.post_send(neighbour.peer, channel_, parts);
  neighbour.acknowledged = false;
  neighbour.round = round;
  neighbour.known = known;
}

void ArrivalGossip::acknowledge(Neighbour& neighbour) {
  std::erase_if(neighbour.acks, [this](Ticket ticket) {
    if (!network_.done(ticket)) return false;
    network_.give_up({&ticket, 1});
    return true;
  });
  const std::span<const std::byte> parts[] = {{memory_->data(), bytes()}};
  neighbour.acks.push_back(network_.post_send(neighbour.peer, channel_, parts));
}

void ArrivalGossip::handle(const std::byte* message, Neighbour& neighbour) {
  std::uint64_t round = 0;
  std::memcpy(&round, message, sizeof round);
  if (round == 0) {
    neighbour.acknowledged = true;
    return;
  }
  const std::byte* const bits = message + sizeof round;
  for (int rank = 0; rank < network_.size(); ++rank)
    if ((bits[index(rank)] & bit(rank)) != std::byte{0}) callbacks_.on_reached(rank, round);
  acknowledge(neighbour);
}

void ArrivalGossip::handle_arrivals() {
  for (Neighbour& neighbour : neighbours_) {
    while (neighbour.receive != 0 && network_.done(neighbour.receive)) {
      network_.give_up({&neighbour.receive, 1});
      handle(memory_->data() + neighbour.input, neighbour);
      post_receive(neighbour);
    }
  }
}

}  // namespace multiring
