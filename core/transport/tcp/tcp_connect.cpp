// How a TcpNetwork opens and accepts connections.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>

#include "base/host_identity.h"
#include "base/protocol.h"
#include "transport/tcp/handshake/connect_errors.h"
#include "transport/tcp/sockets.h"
#include "transport/tcp/tcp_network.h"

namespace multiring::tcp {
namespace {

constexpr int kMaxStripes = 64;
constexpr double kLookupTimeSlice = 0.2;
constexpr std::chrono::milliseconds kBetweenLooks(50);
constexpr double kHostNameSeconds = 1.0;       // a message need not name a host
constexpr double kLongestSeconds = 24 * 3600;  // a day, which the kernel's timers can represent

std::string store_key(const TcpOptions& options, int rank) {
  return "tcp/" + options.job + "/" + std::to_string(rank);
}

// False for NaN.
bool between(double value, double least, double most) { return value >= least && value <= most; }

void validate(const TcpOptions& options) {
  if (options.secret.empty())
    throw Error(ErrorKind::kUsage,
                "a TCP network needs a secret that is not empty: any process can reach its ports");
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size || options.channels < 1 ||
      options.connections_per_interface < 1 || options.connections_per_interface > kMaxStripes ||
      !between(options.heartbeat, 1.0, kLongestSeconds))
    throw Error(ErrorKind::kUsage, "a TCP network cannot have rank " + std::to_string(options.rank) + " of " +
                                       std::to_string(options.size) + ", " +
                                       std::to_string(options.channels) + " channels, " +
                                       std::to_string(options.connections_per_interface) +
                                       " connections per interface and a heartbeat of " +
                                       std::to_string(options.heartbeat) + " s");
}

[[noreturn]] void throw_no_network(const TcpOptions& options, const Error& error) {
  const auto own = static_cast<std::size_t>(options.rank);
  const int rank = own < options.world.size() ? options.world[own] : options.rank;
  ErrorContext context;
  context.rank = options.rank;
  context.host = host_name();
  throw Error(ErrorKind::kPeerLost,
              "rank " + std::to_string(rank) + " on " + context.host +
                  " lost the ranks of all other hosts: its network is gone, " + error.what(),
              context);
}

/// A link that flaps is down for a moment: a rank that was connected before waits for it as long as its
/// connections would.
std::vector<InterfaceAddress> own_addresses(const TcpOptions& options, const WaitOptions& waiting) {
  const Deadline flap = Deadline::after(options.heartbeat);
  for (;;) {
    try {
      return choose_addresses(interface_addresses(), options.interfaces, options.local);
    } catch (const Error& error) {
      if (!options.connected_before) throw;
      if (flap.expired() || waiting.deadline.expired()) throw_no_network(options, error);
    }
    waiting.check_interrupt();
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

}  // namespace

std::uint64_t settings_of(const TcpOptions& options) {
  return static_cast<std::uint64_t>(options.channels) |
         static_cast<std::uint64_t>(options.connections_per_interface) << 32U |
         static_cast<std::uint64_t>(kProtocol) << 40U;
}

TcpNetwork::TcpNetwork(Store* store, const TcpOptions& options, const WaitOptions& waiting)
    : store_(store),
      options_((validate(options), options)),
      settings_(settings_of(options)),
      own_{host_name(), ::getpid(), own_addresses(options, waiting)},
      poller_(descriptors_),
      acceptor_(descriptors_, poller_, options_, *this),
      peers_(static_cast<std::size_t>(options.size)) {
  acceptor_.listen(own_.addresses);
  if (store_ != nullptr) store_->set(store_key(options_, options_.rank), address(), waiting);
}

void TcpNetwork::learn(int rank, const std::string& address) {
  std::optional<Endpoint> endpoint = parse_endpoint(address);
  if (!endpoint)
    throw Error(ErrorKind::kInternal, "the address of rank " + std::to_string(rank) +
                                          " cannot be read: does it run another version of multiring?");
  const std::lock_guard lock(mutex_);
  peer(rank).endpoint = std::move(endpoint);
}

void TcpNetwork::connect(std::span<const Link> links, const WaitOptions& waiting) {
  waiting.deadline.start();
  for (const Link& link : links) check_link(link);
  for (const Link& link : links)
    if (link.peer < options_.rank) look_up_address(link.peer, waiting);
  struct ForgetAtEnd {
    TcpNetwork& network;
    const std::span<const Link> links;
    ~ForgetAtEnd() {
      const std::lock_guard lock(network.mutex_);
      if (!network.all_linked(links)) network.forget_attempts(links);
    }
  } const forget_at_end{*this, links};
  std::uint64_t dropped = 0;
  {
    const std::lock_guard lock(mutex_);
    if (left_) throw left_error(ErrorKind::kInternal);
    dropped = attempts_dropped_;
    open_missing(links, false);
  }
  std::optional<Error> error;
  const WaitResult result = drive(waiting, [&](WaitResult*) {
    if (all_linked(links)) return true;
    reopen_dropped(links, false, dropped);
    error = find_error(links, false, waiting);
    return error.has_value();
  });
  if (result.outcome == WaitResult::Outcome::kCancelled)
    throw Error(ErrorKind::kAborted, "connecting was cancelled: the communicator is being closed");
  if (result.ok() && !error) return;
  const auto compose = [&]() -> std::optional<Error> {
    const std::lock_guard lock(mutex_);
    if (all_linked(links)) return std::nullopt;  // another thread has driven on
    if (error) return find_error(links, false, waiting).value_or(*error);
    return timeout_error(links, waiting);
  };
  std::optional<Error> composed = compose();
  // Looks up its host without the lock, so that the second text names it.
  if (composed && composed->context().peer >= 0 && !host(composed->context().peer).empty())
    composed = compose();
  if (composed) throw *composed;
}

void TcpNetwork::open_missing(std::span<const Link> links, bool of_both) {
  for (std::list<ConnectAttempt> missing = missing_attempts(links, of_both); !missing.empty();) {
    attempts_.splice(attempts_.end(), missing, missing.begin());
    acceptor_.connect(attempts_.back());
  }
}

void TcpNetwork::reopen_dropped(std::span<const Link> links, bool of_both, std::uint64_t& dropped) {
  if (dropped == attempts_dropped_) return;
  dropped = attempts_dropped_;
  open_missing(links, of_both);
}

// Other channels may need the control connection.
void TcpNetwork::forget_attempts(std::span<const Link> links) {
  drop_attempts([&](const ConnectAttempt& attempt) {
    const bool failed = attempt.state == ConnectAttempt::State::kFailed;
    return (failed || attempt.info.channel != ConnectionInfo::kControl) &&
           concerns(attempt.info.server, attempt.info.channel, links);
  });
  ++attempts_dropped_;
  std::erase_if(rejections_, [&](const auto& rejection) {
    return concerns(rejection.first, rejection.second.channel, links);
  });
  wake_waits();
}

void TcpNetwork::check_link(const Link& link) const {
  if (link.peer >= 0 && link.peer < options_.size && link.peer != options_.rank && link.channel >= 0 &&
      link.channel < options_.channels)
    return;
  throw Error(ErrorKind::kInternal,
              "rank " + std::to_string(options_.rank) + " of " + std::to_string(options_.size) +
                  " cannot link to rank " + std::to_string(link.peer) + " on channel " +
                  std::to_string(link.channel) + " of " + std::to_string(options_.channels));
}

bool TcpNetwork::is_linked(const Link& link) const {
  const Peer& other = peer(link.peer);
  const auto found = other.streams.find(link.channel);
  return other.control && found != other.streams.end() && found->second->complete();
}

std::string TcpNetwork::known_host(int rank) const {
  if (rank == options_.rank) return own_.host;
  if (rank < 0 || rank >= options_.size) return "";
  return peer(rank).endpoint ? peer(rank).endpoint->host : peer(rank).address;
}

std::string TcpNetwork::host(int rank) {
  {
    const std::lock_guard lock(mutex_);
    if (store_ == nullptr || rank < 0 || rank >= options_.size || rank == options_.rank ||
        peer(rank).endpoint)
      return known_host(rank);
  }
  std::optional<Endpoint> endpoint;
  const Deadline deadline = Deadline::after(kHostNameSeconds);
  deadline.start();
  const std::function<void()> give_up = [&] {
    if (deadline.expired()) throw Error(ErrorKind::kTimeout, "the store does not answer");
  };
  try {
    endpoint =
        parse_endpoint(store_->get(store_key(options_, rank), 0.0, WaitOptions{}.with_interrupt(give_up)));
  } catch (const Error&) {
    // Not published, or the store has gone: the message is written without it.
  }
  const std::lock_guard lock(mutex_);
  if (!peer(rank).endpoint) peer(rank).endpoint = std::move(endpoint);
  return known_host(rank);
}

// Accepts connections meanwhile: the peer may wait for one.
void TcpNetwork::look_up_address(int rank, const WaitOptions& waiting) {
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (peer(rank).endpoint) return;
    }
    if (store_ == nullptr)
      throw Error(ErrorKind::kInternal, "rank " + std::to_string(options_.rank) +
                                            " has not learned the address of rank " + std::to_string(rank));
    std::string value;
    try {
      value = store_->get(store_key(options_, rank), std::min(kLookupTimeSlice, waiting.deadline.remaining()),
                          waiting);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
      progress();
      waiting.check_interrupt();
      if (waiting.is_cancelled())
        throw Error(ErrorKind::kAborted, "connecting was cancelled: the communicator is being closed");
      const std::lock_guard lock(mutex_);
      if (abort_) throw aborted_error();
      if (left_) throw left_error(ErrorKind::kAborted);
      if (waiting.deadline.expired())
        throw error_between(
            ErrorKind::kTimeout, rank_pair(rank, waiting.deadline.elapsed()), "waited for",
            ", which has published no address: it has not started, has failed before, or was given "
            "another store. Look at its output; MULTIRING_TIMEOUT sets how long to wait");
      continue;
    }
    learn(rank, value);
  }
}

/// `of_both`: also those that the peer would open in `connect`.
std::list<ConnectAttempt> TcpNetwork::missing_attempts(std::span<const Link> links, bool of_both) const {
  std::list<ConnectAttempt> attempts;
  std::set<std::pair<int, int>> planned;
  for (const Link& link : links) {
    if ((link.peer > options_.rank && !of_both) || is_linked(link)) continue;
    if (needs_control(peer(link.peer)) && planned.insert({link.peer, ConnectionInfo::kControl}).second)
      add_attempts(link.peer, ConnectionInfo::kControl, attempts);
    if (planned.insert({link.peer, link.channel}).second) add_attempts(link.peer, link.channel, attempts);
  }
  return attempts;
}

void TcpNetwork::add_attempts(int rank, int channel, std::list<ConnectAttempt>& attempts) const {
  const auto& theirs = peer(rank).endpoint->addresses;
  // Stripes have the same numbers whichever rank connects.
  const bool higher = options_.rank > rank;
  std::vector<AddressPair> pairs =
      higher ? pair_addresses(own_.addresses, theirs) : pair_addresses(theirs, own_.addresses);
  if (!higher)
    for (AddressPair& pair : pairs) std::swap(pair.client, pair.server);
  if (pairs.empty())
    throw error_between(
        ErrorKind::kUsage, rank_pair(rank, 0.0), "has no address of the family (IPv4, IPv6) of any of",
        ": " + own_.addresses.front().address.host_text() + " and " + theirs.front().address.host_text() +
            ". Choose interfaces of a network that both share with MULTIRING_INTERFACES");
  const bool control = channel == ConnectionInfo::kControl;
  const int each = control ? 1 : options_.connections_per_interface;
  pairs.resize(
      std::min<std::size_t>(pairs.size(), control ? 1 : static_cast<std::size_t>(kMaxStripes / each)));
  const bool speeds_known = std::all_of(pairs.begin(), pairs.end(), [&](const AddressPair& pair) {
    return own_.addresses[pair.client].megabits > 0 && theirs[pair.server].megabits > 0;
  });
  const auto stripes = static_cast<std::int32_t>(pairs.size()) * each;
  std::int32_t stripe = 0;
  for (int i = 0; i < each; ++i) {
    for (const AddressPair& pair : pairs) {  // connections that follow each other are of different interfaces
      const InterfaceAddress& from = own_.addresses[pair.client];
      const InterfaceAddress& to = theirs[pair.server];
      const std::uint32_t weight = speeds_known ? std::min(from.megabits, to.megabits) : 1;
      const ConnectionInfo info{options_.rank, rank,    options_.size, channel,
                                stripe++,      stripes, weight,        settings_};
      // Those of an earlier attempt stay.
      const bool made = !control && has_connection(info, rank);
      if (!made && !is_connecting(info)) attempts.push_back({info, from, to});
    }
  }
}

Verdict TcpNetwork::check(const ConnectionInfo& info) {
  if (info.size != options_.size || info.settings != settings_ || info.stripes < 1 ||
      info.stripes > kMaxStripes || info.stripe < 0 || info.stripe >= info.stripes || info.weight == 0 ||
      info.channel < ConnectionInfo::kControl || info.channel >= options_.channels)
    return record_rejection(info, Verdict::kOtherSettings);
  if (info.server != options_.rank || info.client == options_.rank || info.client < 0 ||
      info.client >= options_.size)
    return Verdict::kWrongRank;
  ConnectionInfo reversed = info;
  std::swap(reversed.client, reversed.server);
  if (info.client < options_.rank && (is_connecting(reversed) || has_connection(info, info.client)))
    return Verdict::kSimultaneous;
  const Peer& client = peer(info.client);
  if (info.channel == ConnectionInfo::kControl)
    return record_rejection(info, needs_control(client) ? Verdict::kAccepted : Verdict::kDuplicate);
  const auto found = client.streams.find(info.channel);
  if (found == client.streams.end()) return Verdict::kAccepted;
  const auto stripe = static_cast<std::size_t>(info.stripe);
  const bool fits = found->second->stripes() == static_cast<std::size_t>(info.stripes);
  return record_rejection(
      info, fits && !found->second->has_connection(stripe) ? Verdict::kAccepted : Verdict::kDuplicate);
}

// Or has a closed one, of a `connect` that failed.
bool TcpNetwork::needs_control(const Peer& peer) {
  if (!peer.control) return true;
  return !peer.control->open() && !peer.left &&
         std::none_of(peer.streams.begin(), peer.streams.end(),
                      [](const auto& stream) { return stream.second->complete(); });
}

// The server reports the reason, too.
Verdict TcpNetwork::record_rejection(const ConnectionInfo& info, Verdict verdict) {
  const bool of_all = verdict == Verdict::kOtherSettings;
  if (verdict != Verdict::kAccepted)
    rejections_[info.client] = {verdict, of_all ? ConnectionInfo::kControl : info.channel};
  return verdict;
}

// Whether any of `links` lacks this channel of `rank`. A number out of range prevents all.
bool TcpNetwork::concerns(int rank, int channel, std::span<const Link> links) const {
  return rank < 0 || rank >= options_.size ||
         std::ranges::any_of(
             links,
             [&](const Link& link) {
               return link.peer == rank && (channel == ConnectionInfo::kControl || channel == link.channel) &&
                      !is_linked(link);
             });
}

void TcpNetwork::on_connected(const ConnectionInfo& info, Descriptor socket, bool outgoing) {
  const int rank = outgoing ? info.server : info.client;
  Peer& other = peer(rank);
  links_version_.fetch_add(1, std::memory_order_release);
  other.address = remote_host(socket.get());
  set_no_delay(socket.get());
  set_heartbeat(socket.get(), options_.heartbeat, options_.heartbeat * TcpOptions::kSlowPathFactor,
                info.channel == ConnectionInfo::kControl);
  const std::string path = path_of(socket.get());
  if (info.channel == ConnectionInfo::kControl) {
    if (other.control) {  // of a failed `connect`; events may still be dispatched to it
      other.replaced_controls.push_back(std::move(other.control));
      other.ending.reset();
      other.dead = false;
      std::erase(ending_, rank);
    }
    other.control = std::make_unique<ControlConnection>(std::move(socket), rank, options_.size,
                                                        static_cast<ControlObserver&>(*this));
    other.control->path = path;
    poller_.add(other.control->socket(), *other.control);
    if (abort_) other.control->send_frame(encode_abort(*abort_));
    return;
  }
  auto& stream = other.streams[info.channel];
  if (!stream)
    stream = std::make_unique<TcpStream>(options_.rank, rank, info.channel,
                                         static_cast<std::size_t>(info.stripes));
  DataConnection& connection =
      stream->add_connection(static_cast<std::size_t>(info.stripe), info.weight, std::move(socket), *this);
  connection.path = path;
  poller_.add(connection.socket(), connection);
}

}  // namespace multiring::tcp
