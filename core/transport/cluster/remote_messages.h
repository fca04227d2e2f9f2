#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/export.h"
#include "transport/any_source.h"
#include "transport/cluster/progress_lock.h"
#include "transport/network.h"

namespace multiring {

/// The mailboxes between this rank and ranks of other hosts, in this host's memory.
struct MailboxMemory {
  std::function<std::byte*(int source, int destination, std::uint64_t chunk)> header;
  std::function<std::byte*(int source, int destination, std::uint64_t chunk)> payload;
  /// `chunk` from `source` has arrived; `destination` has read `chunk`.
  std::function<void(int source, std::uint64_t chunk)> on_written;
  std::function<void(int destination, std::uint64_t chunk)> on_read;
  std::size_t chunk_bytes = 0;
};

/// Point-to-point messages with ranks of other hosts: chunks (kChunks), and acknowledgements that they have
/// been read (kAcks).
///
/// If the network makes links on demand, two ranks are connected when one of them first sends to the other or
/// waits for it. A send has left when the peer has accepted the connection, which any of its waits does.
///
/// Chunks are received as soon as any thread of this rank waits for one, so that two ranks that both send
/// first do not block each other while mailboxes have room. Any thread may call. One of those that wait
/// handles what has come for all (the handling thread). `mutex_` guards what was posted.
class MULTIRING_API RemoteMessages {
 public:
  /// `peers`: the ranks of other hosts; the network, which has to outlive it, is connected with them on the
  /// links of `links_of` unless it makes links on demand.
  RemoteMessages(Network& network, int rank, const std::vector<int>& peers, MailboxMemory memory);

  static std::array<Network::Link, 2> links_of(int peer);
  void send(int destination, std::uint64_t chunk, std::size_t bytes);
  void acknowledge(int source, std::uint64_t chunk);
  /// Wait until `ready`, which a chunk from `source`, or an acknowledgement of `destination`, makes true.
  WaitResult await_chunk(int source, const std::function<bool()>& ready, const WaitOptions& waiting);
  WaitResult await_ack(int destination, const std::function<bool()>& ready, const WaitOptions& waiting);
  /// Waits until `any.ready()`. `remote`: those of its sources that are on other hosts.
  WaitResult await_any(AnySource& any, std::span<const int> remote, const WaitOptions& waiting);
  /// Waits until all that was sent to `destination` has left.
  WaitResult await_sent(int destination, const WaitOptions& waiting);
  /// Handles what has come, unless another thread is doing it.
  void poll();
  /// Nothing more is posted; before the network's.
  void leave();

 private:
  using Ticket = Network::Ticket;
  struct Peer {
    bool remote = false;
    bool linked = false;  ///< receives are posted
    std::vector<std::pair<std::uint64_t, std::size_t>>
        unsent;               ///< chunks and their bytes, until it is linked
    std::uint64_t chunk = 1;  ///< the next one to receive
    bool has_header = false;  ///< of that chunk
    Ticket chunk_receive = 0;
    std::uint64_t ack = 0;  ///< received last
    Ticket ack_receive = 0;
    std::uint64_t sent_acks[2] = {};  ///< by the chunk's parity
    std::vector<Ticket> sends;
  };

  Peer& peer(int rank) { return (*peers_)[static_cast<std::size_t>(rank)]; }
  /// Starts to use links that peers have made. For the handling thread.
  void open_new_links();
  void open_link(int rank);
  bool linked(int rank);
  void post(int destination, std::uint64_t chunk, std::size_t bytes);
  void post_header_receive(int source);
  void post_ack_receive(int destination);
  bool release_if_done(Ticket ticket);
  /// Handles all that has arrived. For the handling thread.
  void handle_arrivals();
  void handle_chunk(int source);
  /// Makes progress for a slice of time, for the handling thread.
  using Drive = std::function<WaitResult(const WaitOptions& slice)>;
  WaitResult await(const std::function<bool()>& ready, const Drive& drive, const WaitOptions& waiting);
  /// `rank`: the peer that makes `ready` true. `tickets`: those to wait for; called under `mutex_`.
  WaitResult await(int rank, const std::function<bool()>& ready,
                   const std::function<std::vector<Ticket>()>& tickets, const WaitOptions& waiting);
  WaitResult drive(int rank, const std::function<std::vector<Ticket>()>& tickets, const WaitOptions& slice);
  WaitResult drive_any(AnySource& any, std::span<const int> remote, const WaitOptions& slice);
  /// The end of a source that no receive tells of, if that ends the wait.
  WaitResult find_ended(AnySource& any, std::span<const int> remote);
  /// Makes links to sources; one that cannot be made concerns its source alone.
  WaitResult connect_any(AnySource& any, std::span<const Network::Link> missing, const WaitOptions& slice);

  Network& network_;
  int rank_;
  MailboxMemory memory_;
  ProgressLock progress_lock_;
  std::atomic<int> waiting_{0};      // threads
  bool left_ = false;                // nothing may be posted
  std::uint64_t links_version_ = 0;  // when links were last opened; the handling thread's
  std::mutex mutex_;
  std::shared_ptr<std::vector<Peer>> peers_;  // shared with the network: it holds messages
};

}  // namespace multiring
