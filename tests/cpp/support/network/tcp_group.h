#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "support/rank_group.h"
#include "transport/store.h"
#include "transport/tcp/tcp_network.h"

namespace multiring::testing {

/// Options of one of `size` ranks on this host.
TcpOptions tcp_options(int rank, int size, int channels = 1, int connections = 1);
/// So many seconds, longer under a sanitizer.
WaitOptions wait_seconds(double seconds);
/// All links of a rank: every peer on every channel.
std::vector<Network::Link> all_links(const Network& network);
/// Connects two ranks over all links, one of them in a thread of its own.
void connect_both(Network& one, Network& other);

/// Ranks that are threads of this process, over TCP.
class TcpGroup {
 public:
  using Body = std::function<void(TcpNetwork&)>;

  TcpGroup(int size, int channels = 1, int connections = 1);
  TcpOptions& options(int rank) { return options_[static_cast<std::size_t>(rank)]; }
  InprocStore& store() { return store_; }

  /// Connects every rank with every other and runs `body` in a thread each. Networks stay until all are done,
  /// unless a body takes its own away with `destroy`.
  void run(const Body& body);
  /// The same without connecting.
  void run_unconnected(const Body& body);
  /// The process of `rank` is gone, as its peers see it. Called by the rank itself.
  void destroy(int rank) { networks_[static_cast<std::size_t>(rank)].reset(); }

 private:
  std::vector<TcpOptions> options_;
  InprocStore store_;
  std::vector<std::unique_ptr<TcpNetwork>> networks_;
};

using Outcome = WaitResult::Outcome;
using Tickets = std::vector<Network::Ticket>;
using Payload = std::vector<std::byte>;
/// Bytes that differ between messages and along a message.
Payload pattern(std::size_t bytes, unsigned seed);
Network::Ticket send(Network& network, int peer, int channel, const Payload& message);
Network::Ticket receive(Network& network, int peer, int channel, Payload& message);
/// Waits until all are done, for 20 seconds or as long as it says.
WaitResult await(Network& network, const Tickets& tickets, double seconds = 20);
/// Sends messages of these sizes to every other rank on every channel, then checks those that come: every
/// rank has to call it.
void exchange_messages(Network& network, const std::vector<std::size_t>& sizes);
/// Sends one message in many parts to the next rank, and expects that of the rank before.
void exchange_parts(Network& network);
/// Expects that an interrupt and a cancellation end a wait for what does not come, and leave it as it is.
void expect_ends_early(Network& network, const Tickets& tickets);
/// Waits for a message of `peer` that never comes.
WaitResult wait_until_it_fails(Network& network, int peer, double seconds = 20);
/// Lets the network make progress until the condition holds, which the test expects.
void progress_until(TcpNetwork& network, const std::function<bool()>& reached);

/// Runs `body` in a thread, while the network makes progress.
void beside(TcpNetwork& network, const std::function<void()>& body);

/// Descriptors that this process holds.
int open_descriptors();

}  // namespace multiring::testing
