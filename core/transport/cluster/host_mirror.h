#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "transport/cluster/arrival_gossip.h"
#include "transport/cluster/mirror_routes.h"
#include "transport/network.h"

namespace multiring {

/// The memory of a round.
struct RoundMemory {
  std::function<std::byte*(int rank, std::uint64_t round)> header;
  std::function<std::byte*(int rank, std::uint64_t round)> staging;
  /// All that `rank` has published in `round` is there.
  std::function<void(int rank, std::uint64_t round)> on_arrival;
  ArrivalGossip::Callbacks gossip;
  std::size_t staging_bytes = 0;
};

/// Sends what this rank publishes in a round to the other hosts, and receives what those ranks of other hosts
/// publish whose receiver it is, along `MirrorRoutes`.
///
/// The headers of a message's ranks come first; their last bytes tell how much staging memory follows for
/// each, in one message if that is little, otherwise one for each rank. A round is posted when all of the one
/// before has arrived and left. One thread at a time posts and waits.
class HostMirror {
 public:
  static constexpr double kTimeSlice = 0.02;  ///< seconds that a wait is for one message

  /// `network`: unconnected, has to outlive it.
  HostMirror(Network& network, const MirrorRoutes& routes, RoundMemory memory);

  /// Whether `rank` is known to have arrived at a round at which this rank has not.
  bool is_ahead(int rank) const;
  /// Those that the network has to be connected on.
  std::vector<Network::Link> links() const;
  /// Never blocks.
  void post(int rank, std::uint64_t round, std::size_t staged);
  /// Waits until all has arrived and left.
  WaitResult await(const WaitOptions& waiting);
  /// Handles and forwards what has arrived. For callbacks of a wait.
  void handle_arrivals();
  /// Tells other ranks which ranks have reached the round, where they do not see it themselves.
  void gossip();
  /// Nothing more is posted; before the network's.
  void leave() { left_.store(true, std::memory_order_relaxed); }

 private:
  using Ticket = Network::Ticket;
  struct Incoming {
    const MirrorMessage* message = nullptr;
    std::size_t step = 0;
    std::size_t offset = 0;  ///< in scratch_, of headers and then staging memory; if there are several ranks
    enum class Part { kHeaders, kCombined, kSeparate } part = Part::kHeaders;  ///< to receive next
    std::size_t next = 0;       ///< kSeparate: index of the rank
    Ticket ticket = 0;          ///< of the receive; 0: none is posted
    bool arrived = false;       ///< all of it
    Incoming* after = nullptr;  ///< from the same peer, received when this one has arrived
    bool first = true;          ///< from its peer
  };

  std::set<int> peers() const;
  void handle_messages();
  void receive_headers(Incoming& incoming);
  void receive_staging(Incoming& incoming);
  void advance(Incoming& incoming);
  void handle_headers(Incoming& incoming);
  void handle_combined(Incoming& incoming);
  std::size_t staged_bytes(const MirrorMessage& message) const;
  std::size_t staged_bytes(int rank) const;
  void send_complete_steps();
  void send(const MirrorMessage& message);

  Network& network_;
  const std::vector<MirrorStep> steps_;
  RoundMemory memory_;
  std::optional<ArrivalGossip> gossip_;  // if messages are forwarded
  std::uint64_t round_ = 0;
  std::shared_ptr<std::vector<std::byte>> scratch_;
  std::vector<Incoming> incoming_;  // in the order of the steps
  std::size_t sent_steps_ = 0;
  std::vector<Ticket> sends_;
  std::vector<Ticket> sends_in_wait_;
  std::atomic<bool> left_{false};  // nothing may be posted
  Ticket ticket_in_wait_ = 0;      // of a wait in progress, which releases it
};

/// The number of bytes that follow a header, in its last bytes.
void set_following_bytes(std::byte* header, std::uint64_t bytes);
std::uint64_t following_bytes(const std::byte* header);

}  // namespace multiring
