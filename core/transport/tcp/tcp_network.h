#pragma once

#include <atomic>
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

namespace multiring::tcp {

struct TcpOptions {
  int rank = 0;
  int size = 1;
  /// The ranks as the world numbers them, for messages; empty: the same numbers.
  std::vector<int> world;
  /// What the ranks of a job know and nobody else does; not empty.
  std::string secret;
  /// Keeps jobs, and generations of a job, apart that share a secret or a store.
  std::string job;
  /// Interfaces to use, as InterfaceFilter understands them; empty: the default.
  std::vector<std::string> interfaces;
  /// All ranks are on this host: loopback is enough.
  bool local = false;
  /// The same on all ranks.
  int channels = 1;
  int connections_per_interface = 1;
  /// Messages below this go over one connection.
  std::size_t whole_below = 64 * 1024;
  /// Within about so many seconds a peer's host is found to be gone that did not say so; from 1 to a day.
  double heartbeat = 5.0;
  /// A connection that gets no answer while others to the same address do is given so many times as long.
  static constexpr double kPatience = 6.0;
  double handshake_seconds = 10.0;
  /// Handshakes at a time that others have begun, of all networks with the same `open_handshakes`: copies of
  /// these options share it.
  std::size_t max_strangers = 128;
  std::shared_ptr<tcp::OpenHandshakes> open_handshakes = std::make_shared<tcp::OpenHandshakes>(0);
  /// Microseconds for which a wait asks the kernel again and again before it sleeps, where Waiting::brief
  /// says so. For ranks that have cores to themselves: where they do not, it keeps the peer from answering.
  double spin_microseconds = 0.0;
};

/// What has to be the same on all ranks.
MULTIRING_API std::uint64_t settings_of(const TcpOptions& options);

/// Messages over TCP.
///
/// Every pair of ranks that has a link has one control connection, and for each channel a group of data
/// connections: `connections_per_interface` over each pair of interfaces in the same network. Where both
/// connect the higher rank calls the lower one. A rank that reaches for another calls it; if both do so at
/// the same time, what the higher one calls is taken. Long messages are striped over the connections of a
/// channel in proportion to the speeds of the interfaces, or to `set_weights`.
///
/// **Lost peers.** A process that ends closes its connections, which peers see at once. A host that vanishes
/// is found by the kernels' heartbeat (docs/adr/0010: keepalive on the connections; on the control connection
/// also a limit for what is not acknowledged; what the data connections have on its way is looked at here).
/// It is the peer's kernel that answers it, and not its process: a rank that computes and makes no progress,
/// or is stopped in a debugger, is slow and not lost. How long to wait for a slow one is a matter of
/// deadlines.
///
/// Locks: `mutex_` guards everything but what is said to be atomic or of the driving thread alone; no other
/// lock is taken under it.
class MULTIRING_API TcpNetwork final : public Network, ControlObserver, Doorkeeper::Resident {
 public:
  /// Listens, and publishes the addresses in the store, which has to outlive the network. Waits for nobody.
  TcpNetwork(Store& store, const TcpOptions& options);
  /// Waits until peers have what was sent to them, until a heartbeat after `leave` at most: a rank leaves all
  /// its networks and then destroys them, and a host that has vanished is to delay it once.
  ~TcpNetwork() override;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  int channels() const override { return options_.channels; }
  std::string host(int rank) override;
  void connect(std::span<const Link> links, const Waiting& waiting) override;
  bool links_on_demand() const override { return true; }
  WaitResult reach(std::span<const Link> links, const Waiting& waiting) override;
  bool linked(const Link& link) const override;
  std::uint64_t arrivals() const override { return arrivals_.load(std::memory_order_acquire); }
  WaitResult ended(int rank) const override;
  Ticket post_send(int peer, int channel, std::span<const std::span<const std::byte>> parts) override;
  Ticket post_receive(int peer, int channel, std::span<std::byte> buffer) override;
  WaitResult wait(std::span<const Ticket> tickets, const Waiting& waiting) override;
  bool done(Ticket ticket) const override;
  void give_up(std::span<const Ticket> tickets) override;
  void progress() override;
  void abort(ErrorKind kind, const std::string& message) override;
  void relay(const AbortRecord& record) override;
  bool aborted(AbortRecord* record) const override;
  void leave() override;
  void abandon() override;
  void wake() override;

  /// The addresses that this rank listens on.
  const std::vector<InterfaceAddress>& addresses() const { return own_.addresses; }
  StrangerCounts strangers() const;
  /// Connections of a link; how to divide what is sent over it from now on.
  std::size_t stripes(int peer, int channel) const;
  void set_weights(int peer, int channel, std::span<const std::uint32_t> weights);

 private:
  struct Peer {
    std::unique_ptr<ControlLink> control;
    std::map<int, std::unique_ptr<TcpStream>> streams;  // by channel
    std::vector<std::unique_ptr<ControlLink>> replaced_controls;
    std::optional<Endpoint> endpoint;
    std::string address;                      ///< that a connection with it goes to; empty: none was made yet
    bool left = false;                        ///< said goodbye
    bool dead = false;                        ///< nothing more is expected of it
    std::optional<Clock::time_point> ending;  ///< since when a connection of it is closed
  };

  // LinkObserver, ControlObserver, Resident: all under the lock.
  void has_work(TcpLink& link) override;
  void closed(TcpLink& link, int error) override;
  void fault(TcpLink& link, ErrorKind kind, const std::string& what) override;
  void heard_abort(TcpLink& link, const AbortRecord& record) override;
  void heard_goodbye(TcpLink& link) override;
  Verdict judge(const HelloFacts& facts) override;
  void enter(const HelloFacts& facts, Descriptor socket, bool called) override;

  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)]; }
  TcpStream& stream_to_post(int peer, int channel);
  const TcpStream& stream(int peer, int channel) const;

  /// Waits until `finished`, which is called under the lock and sets the result if it says so.
  WaitResult drive(const Waiting& waiting, const std::function<bool(WaitResult*)>& finished);
  void work();
  void look_at_clock();
  void check_answers();
  void check_answers(Peer& other, Clock::time_point now);
  void await_delivery();
  bool judge_messages(std::span<const Ticket> tickets, WaitResult* result);
  void settle(Peer& peer);
  static bool control_ended(const Peer& peer) { return !peer.control || !peer.control->open(); }
  void spread_abort(const AbortRecord& record, const TcpLink* from);

  // Connecting.
  void check_link(const Link& link) const;
  void find(int peer, const Waiting& waiting);
  std::list<Call> missing_calls(std::span<const Link> links, bool of_both) const;
  /// This rank's call for the same connection that is under way.
  bool is_calling(const HelloFacts& facts) const;
  bool stands(const HelloFacts& facts, int rank) const;
  void drop_calls(const std::function<bool(const Call&)>& dropped);
  Verdict complain(const HelloFacts& facts, Verdict verdict);
  TwoEnds ends(int peer, double waited) const;
  /// The rank as the world numbers it, for messages.
  int world_rank(int rank) const;
  void plan_calls(int peer, int channel, std::list<Call>& calls) const;
  bool ready(const Link& link) const;
  static bool lacks_control(const Peer& peer);
  bool concerns(int rank, std::span<const Link> links) const;
  std::string known_host(int rank) const;
  Error left_error(ErrorKind kind) const;
  std::optional<Error> trouble(std::span<const Link> links, const std::list<Call>& calls,
                               const Waiting& waiting) const;
  Error timeout_error(std::span<const Link> links, const std::list<Call>& calls,
                      const Waiting& waiting) const;

  Store& store_;
  TcpOptions options_;
  std::uint64_t settings_;
  Endpoint own_;
  mutable std::mutex mutex_;
  DescriptorTable descriptors_;
  Poller poller_;  // its sleep and what it found: of the driving thread
  Doorkeeper door_;
  mutable MessageTable messages_;
  std::vector<Peer> peers_;
  std::deque<TcpLink*> work_;  // connections that can move something
  std::vector<int> ending_;    // peers of which a connection is closed, and not all is settled
  Clock::time_point next_check_ = {};
  std::optional<AbortRecord> abort_;
  std::list<Call> begun_;  // by reach, and not done
  std::atomic<std::uint64_t> arrivals_{0};
  std::map<int, Verdict> complaints_;  // what was answered to ranks that called and were refused
  bool left_ = false;
  Deadline delivery_ = Deadline::never();  // of what was sent before this rank left
};

}  // namespace multiring::tcp

namespace multiring {

using tcp::TcpNetwork;
using tcp::TcpOptions;

}  // namespace multiring
