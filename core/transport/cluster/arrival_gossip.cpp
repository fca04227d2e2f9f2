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

RollCall::RollCall(Network& network, int channel, const std::set<int>& neighbours, Knowledge knowledge)
    : network_(network),
      channel_(channel),
      knowledge_(std::move(knowledge)),
      known_(index(network.size() - 1) + 1),
      memory_(std::make_shared<std::vector<std::byte>>((1 + 2 * neighbours.size()) * bytes())) {
  std::size_t place = bytes();
  for (const int peer : neighbours) {
    Neighbour& neighbour = neighbours_.emplace_back();
    neighbour.peer = peer;
    neighbour.told = place;
    neighbour.heard = place + bytes();
    place += 2 * bytes();
  }
  network_.keep(memory_);
}

void RollCall::listen() {
  for (Neighbour& neighbour : neighbours_)
    if (neighbour.listening == 0) expect(neighbour);
}

void RollCall::expect(Neighbour& neighbour) {
  neighbour.listening =
      network_.post_receive(neighbour.peer, channel_, {memory_->data() + neighbour.heard, bytes()});
}

void RollCall::tell(std::uint64_t round) {
  std::ranges::fill(known_, std::byte{0});
  int known = 0;
  for (int rank = 0; rank < network_.size(); ++rank) {
    if (!knowledge_.has_come(rank, round)) continue;
    known_[index(rank)] |= bit(rank);
    ++known;
  }
  for (Neighbour& neighbour : neighbours_) tell(neighbour, round, known);
}

void RollCall::tell(Neighbour& neighbour, std::uint64_t round, int known) {
  if (!neighbour.has_answered || (neighbour.round == round && neighbour.known == known)) return;
  if (neighbour.telling != 0) {
    if (!network_.done(neighbour.telling)) return;
    network_.give_up({&neighbour.telling, 1});
  }
  std::byte* const message = memory_->data() + neighbour.told;
  std::memcpy(message, &round, sizeof round);
  std::memcpy(message + sizeof round, known_.data(), known_.size());
  const std::span<const std::byte> parts[] = {{message, bytes()}};
  neighbour.telling = network_.post_send(neighbour.peer, channel_, parts);
  neighbour.has_answered = false;
  neighbour.round = round;
  neighbour.known = known;
}

void RollCall::answer(Neighbour& neighbour) {
  std::erase_if(neighbour.answers, [this](Ticket ticket) {
    if (!network_.done(ticket)) return false;
    network_.give_up({&ticket, 1});
    return true;
  });
  const std::span<const std::byte> parts[] = {{memory_->data(), bytes()}};
  neighbour.answers.push_back(network_.post_send(neighbour.peer, channel_, parts));
}

void RollCall::take(const std::byte* message, Neighbour& neighbour) {
  std::uint64_t round = 0;
  std::memcpy(&round, message, sizeof round);
  if (round == 0) {
    neighbour.has_answered = true;
    return;
  }
  const std::byte* const bits = message + sizeof round;
  for (int rank = 0; rank < network_.size(); ++rank)
    if ((bits[index(rank)] & bit(rank)) != std::byte{0}) knowledge_.heard(rank, round);
  answer(neighbour);
}

void RollCall::take_in() {
  for (Neighbour& neighbour : neighbours_) {
    while (neighbour.listening != 0 && network_.done(neighbour.listening)) {
      network_.give_up({&neighbour.listening, 1});
      take(memory_->data() + neighbour.heard, neighbour);
      expect(neighbour);
    }
  }
}

}  // namespace multiring
