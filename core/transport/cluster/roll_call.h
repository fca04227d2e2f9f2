#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "transport/network.h"

namespace multiring {

/// Who is late, where what ranks publish passes through others: one that is late holds up what many have
/// published. Ranks that have waited for long tell those that they send to of whom they know that they have
/// come, and so on, until all that wait know it of all that wait.
///
/// Neighbours are many, so a rank that is late hardly ever cuts others off. For the thread that drives the
/// network's waits.
class RollCall {
 public:
  struct Knowledge {
    std::function<bool(int rank, std::uint64_t round)> has_come;
    std::function<void(int rank, std::uint64_t round)> heard;  ///< that it has come
  };

  /// `size`: of the network. Ranks tell `listeners`, and hear of `tellers`; the network is to be connected
  /// with both on `channel` before anything is called.
  RollCall(Network& network, int channel, const std::set<int>& listeners, const std::set<int>& tellers,
           Knowledge knowledge);

  /// From here on what is told can come.
  void listen();
  /// Tells whoever does not know it yet. Never blocks.
  void tell(std::uint64_t round);
  /// Takes in what has been told.
  void take_in();

 private:
  using Ticket = Network::Ticket;
  struct Neighbour {
    int peer = 0;
    std::size_t place = 0;  // in memory_
    Ticket ticket = 0;      // 0: none
    std::uint64_t round = 0;
    int known = 0;  // of that round, by what it was told last
  };

  std::byte* at(const Neighbour& neighbour) const { return memory_->data() + neighbour.place; }
  std::size_t bytes() const { return sizeof(std::uint64_t) + known_.size(); }
  void expect(Neighbour& teller);
  void tell(Neighbour& listener, std::uint64_t round, int known);

  Network& network_;
  const int channel_;
  const Knowledge knowledge_;
  std::vector<Neighbour> listeners_;
  std::vector<Neighbour> tellers_;
  std::vector<std::byte> known_;                    // a bit for each rank
  std::shared_ptr<std::vector<std::byte>> memory_;  // a message of each neighbour: the round, then such bits
};

}  // namespace multiring
