#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/cluster/progress_lock.h"
#include "transport/network.h"

namespace multiring {

/// The mailboxes between this rank and others, as they lie in this host's memory.
struct MailMemory {
  std::function<std::byte*(int source, int destination, std::uint64_t chunk)> header;
  std::function<std::byte*(int source, int destination, std::uint64_t chunk)> payload;
  /// `chunk` from `source` is there; `destination` has read `chunk`.
  std::function<void(int source, std::uint64_t chunk)> came;
  std::function<void(int destination, std::uint64_t chunk)> was_read;
  std::size_t chunk_bytes = 0;
};

/// Point-to-point messages with ranks of other hosts: chunks on one channel, and on another the answers that
/// they have been read.
///
/// Two ranks are connected when one of them first sends to the other or waits for it, if the network makes
/// links on demand; a send is on its way when the peer has answered, which any of its waits does.
///
/// What a peer sends is received as soon as any thread of this rank waits for mail, so that ranks that send
/// to each other first and receive then do not wait for each other, as far as mailboxes go. Any thread may
/// call. One of those that wait drives the network for all. `mutex_` guards what was posted.
class RemoteMail {
 public:
  static constexpr int kChannels = 2;

  /// `peers`: the ranks of other hosts; the network is connected with them unless it makes links on demand.
  RemoteMail(std::unique_ptr<Network> network, int rank, const std::vector<int>& peers, MailMemory memory);

  Network& network() const { return *network_; }
  void send(int destination, std::uint64_t chunk, std::size_t bytes);
  void answer(int source, std::uint64_t chunk);
  /// Wait until `ready`, which a message from `source`, or an answer of `destination`, will make true.
  WaitResult await_chunk(int source, const std::function<bool()>& ready, const Waiting& waiting);
  WaitResult await_answer(int destination, const std::function<bool()>& ready, const Waiting& waiting);
  /// Wait until all that was sent to `destination` has left.
  WaitResult await_sent(int destination, const Waiting& waiting);
  /// Takes in what has come, unless a wait does so already.
  void look();
  /// Says goodbye to the peers.
  void leave();

 private:
  using Ticket = Network::Ticket;
  struct Peer {
    bool remote = false;
    bool linked = false;  ///< messages are posted
    std::vector<std::pair<std::uint64_t, std::size_t>>
        unsent;               ///< chunks, and bytes of each, for want of a link
    std::uint64_t chunk = 1;  ///< that is being received
    bool body = false;        ///< its header is there
    Ticket incoming = 0;
    std::uint64_t answer = 0;  ///< received
    Ticket answering = 0;
    std::uint64_t answers[2] = {};  ///< on their way, by the chunk's parity
    std::vector<Ticket> sends;
  };

  Peer& peer(int rank) { return (*peers_)[static_cast<std::size_t>(rank)]; }
  /// Where links have come to stand, posts what is to be posted. For the driver.
  void welcome();
  void start(int rank);
  bool linked(int rank);
  void post(int destination, std::uint64_t chunk, std::size_t bytes);
  void expect_header(int source);
  void expect_answer(int destination);
  bool arrived(Ticket ticket);
  /// Takes in what has come, from whomever. For the driver.
  void take_in();
  void take_chunk(int source);
  void retire_sends(Peer& peer);
  /// `rank`: who is to make `ready` true.
  WaitResult await(int rank, const std::function<bool()>& ready,
                   const std::function<std::vector<Ticket>()>& tickets, const Waiting& waiting);
  WaitResult drive(int rank, const std::function<std::vector<Ticket>()>& tickets, const Waiting& turn);

  std::unique_ptr<Network> network_;
  int rank_;
  MailMemory memory_;
  DriverSeat seat_;
  std::atomic<int> waiting_{0};  // threads
  bool left_ = false;            // nothing may be posted
  std::uint64_t arrivals_ = 0;   // of the network when links were last looked for; the driver's
  std::mutex mutex_;
  // Messages lie in it.
  std::shared_ptr<std::vector<Peer>> peers_;
};

}  // namespace multiring
