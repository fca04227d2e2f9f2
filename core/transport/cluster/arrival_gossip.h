#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "base/export.h"
#include "transport/network.h"

namespace multiring {

/// Who is late, where what ranks publish passes through others: one that is late holds up what many have
/// published. Ranks that have waited for long tell those that they are connected with of whom they know that
/// they have come, and so on, until all that wait know it of all that wait.
///
/// Neighbours are many, so a rank that is late hardly ever cuts others off. A neighbour answers what it is
/// told, and is told more only then: however long it stays away, it has one message to read when it comes.
/// For the thread that drives the network's waits.
class MULTIRING_API RollCall {
 public:
  struct Knowledge {
    std::function<bool(int rank, std::uint64_t round)> has_come;
    std::function<void(int rank, std::uint64_t round)> heard;  ///< that it has come
  };

  /// The network is to be connected with `neighbours` on `channel` before anything is called.
  RollCall(Network& network, int channel, const std::set<int>& neighbours, Knowledge knowledge);

  /// From here on what is told can come.
  void listen();
  /// Tells whoever has answered and does not know it yet. Never blocks.
  void tell(std::uint64_t round);
  /// Takes in what has been told, and answers.
  void take_in();

 private:
  using Ticket = Network::Ticket;
  struct Neighbour {
    int peer = 0;
    std::size_t told = 0;   // place in memory_ of what it is told
    std::size_t heard = 0;  // and of what it says
    Ticket telling = 0;     // 0: none
    Ticket listening = 0;
    std::vector<Ticket> answers;
    bool has_answered = true;
    std::uint64_t round = 0;
    int known = 0;  // of that round, by what it was told last
  };

  std::size_t bytes() const { return sizeof(std::uint64_t) + known_.size(); }
  void expect(Neighbour& neighbour);
  void tell(Neighbour& neighbour, std::uint64_t round, int known);
  void answer(Neighbour& neighbour);
  void take(const std::byte* message, Neighbour& neighbour);

  Network& network_;
  const int channel_;
  const Knowledge knowledge_;
  std::vector<Neighbour> neighbours_;
  std::vector<std::byte> known_;  // a bit for each rank
  // Messages: a round, then such bits. The first one is an answer, of round 0; then two of each neighbour.
  std::shared_ptr<std::vector<std::byte>> memory_;
};

}  // namespace multiring
