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
#include "transport/cluster/progress_lock.h"
#include "transport/network.h"

namespace multiring {

/// What a round's memory is, for those who carry it to another host.
struct RoundMemory {
  std::function<std::byte*(int rank, std::uint64_t round)> header;
  std::function<std::byte*(int rank, std::uint64_t round)> staging;
  /// What `rank` has published in `round` is there.
  std::function<void(int rank, std::uint64_t round)> arrived;
  RollCall::Knowledge knowledge;
  std::size_t staging_bytes = 0;
};

/// Brings what this rank publishes in a round to the other hosts, and to this host what those ranks of other
/// hosts publish that this rank answers for, by the ways of `MirrorRoutes`.
///
/// A message of theirs is the headers of its ranks, of which the last bytes tell how much staging memory
/// follows for each: in one message if that is little, or else one for each rank. All of a round has to have
/// arrived and left before the next one is posted, so there is no more than one round on the way. One thread
/// at a time posts and waits.
class HostMirror {
 public:
  static constexpr double kTurn = 0.02;  ///< seconds that a wait looks at one thing

  /// What the network has to have.
  static int channels(const MirrorRoutes& routes) { return routes.steps.size() > 1 ? 2 : 1; }

  HostMirror(std::unique_ptr<Network> network, const MirrorRoutes& routes, RoundMemory memory);

  Network& network() const { return *network_; }
  /// The network is to be connected on these.
  std::vector<Network::Link> links() const;
  /// Never blocks.
  void post(int rank, std::uint64_t round, std::size_t staged);
  /// Waits until all is there and all has left.
  WaitResult await(const Waiting& waiting);
  /// Takes in what has come since, and passes it on; for what a wait calls now and then.
  void take_in();
  /// Tells others who has come to the round, if they do not see that themselves.
  void tell();
  /// Moves what can be moved, unless a wait does so already. Any thread may call it.
  void look();
  /// Says goodbye to the partners.
  void leave();

 private:
  using Ticket = Network::Ticket;
  struct Incoming {
    const MirrorMessage* message = nullptr;
    std::size_t step = 0;
    std::size_t place = 0;  ///< in scratch_: headers and then staging memory, if there are several ranks
    enum class Part { kHeaders, kTogether, kEach } part = Part::kHeaders;  ///< what is expected
    std::size_t next = 0;                                                  ///< kEach: whose
    Ticket expected = 0;                                                   ///< 0: all is there
  };

  std::set<int> peers() const;
  void take_in_messages();
  void expect_headers(Incoming& incoming);
  void expect_staging(Incoming& incoming);
  void advance(Incoming& incoming);
  void take_headers(Incoming& incoming);
  void take_together(Incoming& incoming);
  std::size_t staged_bytes(const MirrorMessage& message) const;
  std::size_t staged_bytes(int rank) const;
  void send_what_is_complete();
  void send(const MirrorMessage& message);
  WaitResult wait(std::span<const Ticket> tickets, const Waiting& waiting);

  std::unique_ptr<Network> network_;
  const std::vector<MirrorStep> steps_;
  RoundMemory memory_;
  DriverSeat seat_;
  std::optional<RollCall> roll_call_;  // where messages are passed on
  std::uint64_t round_ = 0;
  std::shared_ptr<std::vector<std::byte>> scratch_;
  std::vector<Incoming> incoming_;  // in the order of the steps
  std::size_t sent_steps_ = 0;
  std::vector<Ticket> sends_;
  std::vector<Ticket> leaving_;    // of sends, those that a wait may be about
  std::atomic<bool> left_{false};  // nothing may be posted
  Ticket awaited_ = 0;             // by a wait that is under way, which uses it up
};

/// The bytes that follow a header, as the header's last ones tell.
void set_following_bytes(std::byte* header, std::uint64_t bytes);
std::uint64_t following_bytes(const std::byte* header);

}  // namespace multiring
