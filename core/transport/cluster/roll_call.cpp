#include "transport/cluster/roll_call.h"

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

RollCall::RollCall(Network& network, int channel, const std::set<int>& listeners,
                   const std::set<int>& tellers, Knowledge knowledge)
    : network_(network),
      channel_(channel),
      knowledge_(std::move(knowledge)),
      known_(index(network.size() - 1) + 1),
      memory_(std::make_shared<std::vector<std::byte>>((listeners.size() + tellers.size()) * bytes())) {
  std::size_t place = 0;
  for (auto* const neighbours : {&listeners_, &tellers_}) {
    for (const int peer : neighbours == &listeners_ ? listeners : tellers) {
      neighbours->push_back({peer, place});
      place += bytes();
    }
  }
  network_.keep(memory_);
}

void RollCall::listen() {
  for (Neighbour& teller : tellers_)
    if (teller.ticket == 0) expect(teller);
}

void RollCall::expect(Neighbour& teller) {
  teller.ticket = network_.post_receive(teller.peer, channel_, {at(teller), bytes()});
}

void RollCall::tell(std::uint64_t round) {
  std::ranges::fill(known_, std::byte{0});
  int known = 0;
  for (int rank = 0; rank < network_.size(); ++rank) {
    if (!knowledge_.has_come(rank, round)) continue;
    known_[index(rank)] |= bit(rank);
    ++known;
  }
  for (Neighbour& listener : listeners_) tell(listener, round, known);
}

void RollCall::tell(Neighbour& listener, std::uint64_t round, int known) {
  if (listener.round == round && listener.known == known) return;
  if (listener.ticket != 0) {
    if (!network_.done(listener.ticket)) return;  // it has not even read what it was told before
    network_.give_up({&listener.ticket, 1});
  }
  std::memcpy(at(listener), &round, sizeof round);
  std::memcpy(at(listener) + sizeof round, known_.data(), known_.size());
  const std::span<const std::byte> message[] = {{at(listener), bytes()}};
  listener.ticket = network_.post_send(listener.peer, channel_, message);
  listener.round = round;
  listener.known = known;
}

void RollCall::take_in() {
  for (Neighbour& teller : tellers_) {
    while (teller.ticket != 0 && network_.done(teller.ticket)) {
      network_.give_up({&teller.ticket, 1});
      std::uint64_t round = 0;
      std::memcpy(&round, at(teller), sizeof round);
      const std::byte* const bits = at(teller) + sizeof round;
      for (int rank = 0; rank < network_.size(); ++rank)
        if ((bits[index(rank)] & bit(rank)) != std::byte{0}) knowledge_.heard(rank, round);
      expect(teller);
    }
  }
}

}  // namespace multiring
