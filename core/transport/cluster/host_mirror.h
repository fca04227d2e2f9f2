#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "transport/cluster/driver_seat.h"
#include "transport/network.h"

namespace multiring {

/// What a round's memory is, for those who carry it to another host.
struct RoundMemory {
  std::function<std::byte*(int rank, std::uint64_t round)> header;
  std::function<std::byte*(int rank, std::uint64_t round)> staging;
  /// What `rank` has published in `round` is there.
  std::function<void(int rank, std::uint64_t round)> arrived;
  std::size_t staging_bytes = 0;
};

/// Brings what this rank publishes in a round to the other hosts, and to this host what those ranks of other
/// hosts publish that this rank answers for.
///
/// A message is the header, of which the last bytes tell how much staging memory follows; that is a message
/// of its own. All of a round has to have arrived and left before the next one is posted, so there is no
/// more than one round on the way. One thread at a time posts and waits.
class HostMirror {
 public:
  /// `targets`: ranks that answer for this one, one on each other host. `sources`: those this one answers
  /// for.
  HostMirror(std::unique_ptr<Network> network, const std::vector<int>& targets,
             const std::vector<int>& sources, RoundMemory memory);

  Network& network() const { return *network_; }
  /// Targets and sources; the network is to be connected with them.
  std::vector<int> partners() const;
  /// Never blocks.
  void post(int rank, std::uint64_t round, std::size_t staged);
  /// Waits until all is there and all has left.
  WaitResult await(const Waiting& waiting);
  /// Takes in what has come since; for what a wait calls now and then.
  void take_in();
  /// Moves what can be moved, unless a wait does so already. Any thread may call it.
  void look();
  /// Says goodbye to the partners.
  void leave();

 private:
  using Ticket = Network::Ticket;
  struct Source {
    int rank = 0;
    bool body = false;    ///< the header is there, and staging memory is to follow
    Ticket expected = 0;  ///< 0: all is there
  };

  void advance(Source& source);
  WaitResult wait(std::span<const Ticket> tickets, const Waiting& waiting);

  std::unique_ptr<Network> network_;
  std::vector<int> targets_;
  RoundMemory memory_;
  DriverSeat seat_;
  std::uint64_t round_ = 0;
  std::vector<Source> sources_;
  std::vector<Ticket> sends_;
  std::atomic<bool> left_{false};  // nothing may be posted
  Ticket awaited_ = 0;             // by a wait that is under way, which uses it up
};

/// The bytes that follow a header, as the header's last ones tell.
void set_following_bytes(std::byte* header, std::uint64_t bytes);
std::uint64_t following_bytes(const std::byte* header);

}  // namespace multiring
