#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport/network.h"
#include "transport/store.h"
#include "transport/tcp/connections/control_connection.h"
#include "transport/tcp/connections/message_table.h"
#include "transport/tcp/connections/stream.h"
#include "transport/tcp/handshake/acceptor.h"
#include "transport/tcp/handshake/address.h"
#include "transport/tcp/handshake/connect_errors.h"
#include "transport/tcp/tcp_options.h"

namespace multiring::tcp {

/// Messages over TCP.
///
/// Every pair of ranks that has a link has one control connection, and for each channel a group of data
/// connections: `connections_per_interface` over each pair of interfaces in the same network. In `connect`
/// the higher rank opens them, in `connect_on_demand` the one that calls it; if both do, those of the higher
/// rank are taken. Long messages are striped over the connections of a channel in proportion to the speeds of
/// the interfaces, or to `set_weights`.
///
/// **Lost peers.** A process that ends closes its connections, which peers see at once. A host that vanishes
/// is found by a heartbeat (docs/adr/0010): keepalive of the kernel, on the control connection also a limit
/// for unacknowledged data, which for data connections is checked here. The peer's kernel answers the
/// heartbeat, and not its process: a rank that computes, or is stopped in a debugger, is slow and not lost.
/// Deadlines limit how long a slow rank is waited for.
///
/// **Threads.** Of the threads that connect or wait one drives: it sleeps until the kernel has events, and
/// handles them for all. The others sleep until it has, and one of them takes over when it returns.
///
/// Lock: `mutex_` guards all that is neither atomic nor the driving thread's; only that of LostRanks is taken
/// under it.
class MULTIRING_API TcpNetwork final : public Network, ControlObserver, Acceptor::Delegate {
 public:
  /// Listens, and publishes the addresses in the store, which is asked for those that are not learned before
  /// and has to outlive the network; null: all are learned. Waits for nothing but the store.
  TcpNetwork(Store* store, const TcpOptions& options, const WaitOptions& waiting = {});
  TcpNetwork(Store& store, const TcpOptions& options, const WaitOptions& waiting = {})
      : TcpNetwork(&store, options, waiting) {}
  /// Waits until peers have what was sent to them, at most until a heartbeat after `leave`. A rank leaves all
  /// its networks before it destroys them, so that a host that has vanished delays it once.
  ~TcpNetwork() override;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  int channels() const override { return options_.channels; }
  std::string host(int rank) override;
  std::string address() const override { return format_endpoint(own_); }
  void learn(int rank, const std::string& address) override;
  void connect(std::span<const Link> links, const WaitOptions& waiting) override;
  bool links_on_demand() const override { return true; }
  WaitResult connect_on_demand(std::span<const Link> links, const WaitOptions& waiting) override;
  bool linked(const Link& link) const override;
  std::uint64_t links_version() const override { return links_version_.load(std::memory_order_acquire); }
  bool is_ahead(int rank, int channel) const override;
  WaitResult ended(int rank) const override;
  Ticket post_send(int peer, int channel, std::span<const std::span<const std::byte>> parts) override;
  Ticket post_receive(int peer, int channel, std::span<std::byte> buffer) override;
  WaitResult wait(std::span<const Ticket> tickets, const WaitOptions& waiting) override;
  WaitResult wait_any(std::span<const Ticket> tickets, const WaitOptions& waiting) override;
  bool done(Ticket ticket) const override;
  void give_up(std::span<const Ticket> tickets) override;
  void progress() override;
  void abort(const Error& error) override;
  void relay(const AbortRecord& record) override;
  bool aborted(AbortRecord* record) const override;
  void leave() override;
  void abandon() override;
  void wake() override;

  /// The addresses that this rank listens on.
  const std::vector<InterfaceAddress>& addresses() const { return own_.addresses; }
  RejectedCounts rejected() const;
  /// Number of connections of a link, and how later messages are divided among them.
  std::size_t stripes(int peer, int channel) const;
  void set_weights(int peer, int channel, std::span<const std::uint32_t> weights);

 private:
  struct Peer {
    std::unique_ptr<ControlConnection> control;
    std::map<int, std::unique_ptr<TcpStream>> streams;  // by channel
    std::vector<std::unique_ptr<ControlConnection>> replaced_controls;
    std::optional<Endpoint> endpoint;
    std::string address;                      ///< of its end of a connection; empty: there was none yet
    bool left = false;                        ///< said goodbye
    bool dead = false;                        ///< nothing more is expected of it
    std::optional<Clock::time_point> ending;  ///< when a connection of it was closed first
  };

  // ConnectionObserver, ControlObserver, Delegate: all under the lock.
  void on_ready(TcpConnection& connection) override;
  void on_closed(TcpConnection& connection, int error) override;
  void on_fault(TcpConnection& connection, ErrorKind kind, const std::string& what) override;
  void on_abort(TcpConnection& connection, const AbortRecord& record) override;
  void on_goodbye(TcpConnection& connection) override;
  Verdict check(const ConnectionInfo& info) override;
  void on_connected(const ConnectionInfo& info, Descriptor socket, bool outgoing) override;

  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  TcpStream& stream_to_post(int peer, int channel);
  const TcpStream& stream(int peer, int channel) const;

  class Driver;
  /// Makes progress until `finished`, which is called under the lock and sets the result.
  WaitResult drive(const WaitOptions& waiting, const std::function<bool(WaitResult*)>& finished);
  void handle_events();
  /// Other threads' waits look at what this one has changed. Under the lock.
  void wake_waits();
  void advance_connections();
  void check_timers();
  void learn_of_lost_ranks();
  void check_heartbeats();
  void check_heartbeats(Peer& other, Clock::time_point now);
  void await_delivery();
  bool check_tickets(std::span<const Ticket> tickets, WaitResult* result);
  bool check_any(std::span<const Ticket> tickets, WaitResult* result) const;
  [[noreturn]] void throw_out_of_step(const Message& message) const;
  void fail_pending(Peer& peer);
  static bool control_ended(const Peer& peer) { return !peer.control || !peer.control->open(); }
  void propagate_abort(const AbortRecord& record, const TcpConnection* from);

  // Connecting.
  void check_link(const Link& link) const;
  void look_up_address(int peer, const WaitOptions& waiting);
  std::list<ConnectAttempt> missing_attempts(std::span<const Link> links, bool of_both) const;
  /// Whether this rank is opening the same connection.
  bool is_connecting(const ConnectionInfo& info) const;
  bool has_connection(const ConnectionInfo& info, int rank) const;
  void drop_attempts(const std::function<bool(const ConnectAttempt&)>& dropped);
  Verdict record_rejection(const ConnectionInfo& info, Verdict verdict);
  RankPair rank_pair(int peer, double waited) const;
  /// For messages.
  int world_rank(int rank) const;
  void add_attempts(int peer, int channel, std::list<ConnectAttempt>& attempts) const;
  /// Opens what `links` lack, unless that is under way.
  void open_missing(std::span<const Link> links, bool of_both);
  bool is_linked(const Link& link) const;  // under the lock
  bool all_linked(std::span<const Link> links) const {
    return std::ranges::all_of(links, [this](const Link& link) { return is_linked(link); });
  }
  static bool needs_control(const Peer& peer);
  bool concerns(int rank, int channel, std::span<const Link> links) const;
  std::string known_host(int rank) const;
  Error left_error(ErrorKind kind) const;
  Error aborted_error() const;
  std::optional<Error> find_error(std::span<const Link> links, bool of_both,
                                  const WaitOptions& waiting) const;
  Error timeout_error(std::span<const Link> links, const WaitOptions& waiting) const;
  /// Opens again what another thread has dropped since.
  void reopen_dropped(std::span<const Link> links, bool of_both, std::uint64_t& dropped);
  /// Ends what is under way to connect `links`, of this thread or another one: each may retry.
  void forget_attempts(std::span<const Link> links);

  Store* store_;
  TcpOptions options_;
  std::uint64_t settings_;
  Endpoint own_;
  mutable std::mutex mutex_;
  bool driven_ = false;                 // a thread drives
  int sleepers_ = 0;                    // threads that wait while another one drives
  std::condition_variable progressed_;  // what they wait for
  std::uint64_t progress_version_ = 0;  // changes with it
  DescriptorTable descriptors_;
  Poller poller_;  // sleep and the events that it found: the driving thread's
  Acceptor acceptor_;
  mutable MessageTable messages_;
  std::vector<Peer> peers_;
  std::deque<TcpConnection*> ready_connections_;
  std::vector<int> ending_;  // peers with a closed connection, whose others may still deliver
  Clock::time_point next_check_ = {};
  std::uint64_t lost_version_ = 0;  // of options_.lost_ranks
  std::optional<AbortRecord> abort_;
  std::list<ConnectAttempt> attempts_;  // not done, of all threads
  std::uint64_t attempts_dropped_ = 0;  // how often: who waits for one that is gone opens it again
  std::atomic<std::uint64_t> links_version_{0};
  struct Rejection {
    Verdict verdict = Verdict::kAccepted;
    int channel = 0;  ///< kControl: of the whole peer
  };
  std::map<int, Rejection> rejections_;  // of clients, by rank
  bool left_ = false;
  Deadline delivery_ = Deadline::never();  // of what was sent before this rank left
};

}  // namespace multiring::tcp

namespace multiring {

using tcp::TcpNetwork;

}  // namespace multiring
