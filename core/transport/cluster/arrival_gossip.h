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

/// Finds stragglers where published data passes through other ranks, so that one straggler holds back the
/// data of many. Ranks that have waited for long send their neighbours the set of ranks that they know to
/// have reached the round. It spreads until all that wait know of all that wait.
///
/// Every rank has many neighbours, so that a straggler hardly ever separates others. A neighbour acknowledges
/// each message before it gets the next one. For the thread that drives the rounds.
class MULTIRING_API ArrivalGossip {
 public:
  struct Callbacks {
    std::function<bool(int rank, std::uint64_t round)> has_reached;
    std::function<void(int rank, std::uint64_t round)> on_reached;  ///< as others tell
  };

  /// The network has to be connected with `neighbours` on `channel` before the first call.
  ArrivalGossip(Network& network, int channel, const std::set<int>& neighbours, Callbacks callbacks);

  /// Posts the receives.
  void start();
  /// Sends what is new to neighbours that have acknowledged the last message. Never blocks.
  void send(std::uint64_t round);
  /// Handles and acknowledges what has arrived.
  void handle_arrivals();

 private:
  using Ticket = Network::Ticket;
  struct Neighbour {
    int peer = 0;
    std::size_t output = 0;  // offsets in memory_
    std::size_t input = 0;
    Ticket send = 0;  // 0: none
    Ticket receive = 0;
    std::vector<Ticket> acks;
    bool acknowledged = true;
    // Of the last message to it: its round, and the number of ranks in it.
    std::uint64_t round = 0;
    int known = 0;
  };

  std::size_t bytes() const { return sizeof(std::uint64_t) + known_.size(); }
  void post_receive(Neighbour& neighbour);
  void send(Neighbour& neighbour, std::uint64_t round, int known);
  void acknowledge(Neighbour& neighbour);
  void handle(const std::byte* message, Neighbour& neighbour);

  Network& network_;
  const int channel_;
  const Callbacks callbacks_;
  std::vector<Neighbour> neighbours_;
  std::vector<std::byte> known_;  // a bit for each rank
  // Messages: a round, then such bits. First an acknowledgement, of round 0; then two of each neighbour.
  std::shared_ptr<std::vector<std::byte>> memory_;
};

}  // namespace multiring
