// How a TcpNetwork comes to its connections.

#include <unistd.h>

#include <algorithm>
#include <set>

#include "base/host_identity.h"
#include "base/protocol.h"
#include "transport/tcp/handshake/connect_errors.h"
#include "transport/tcp/sockets.h"
#include "transport/tcp/tcp_network.h"

namespace multiring::tcp {
namespace {

constexpr int kMaxStripes = 64;
constexpr double kLookupSlice = 0.2;
constexpr double kShortestHandshake = 0.001;
constexpr double kLongestSeconds = 24 * 3600;  // a day, which the kernel's timers can hold as well

std::string store_key(const TcpOptions& options, int rank) {
  return "tcp/" + options.job + "/" + std::to_string(rank);
}

// False for what is no number.
bool between(double value, double least, double most) { return value >= least && value <= most; }

void check(const TcpOptions& options) {
  if (options.secret.empty())
    throw Error(ErrorKind::kUsage,
                "a TCP network needs a secret that is not empty: anybody can reach its ports");
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size || options.channels < 1 ||
      options.connections_per_interface < 1 || options.connections_per_interface > kMaxStripes ||
      !between(options.heartbeat, 1.0, kLongestSeconds))
    throw Error(ErrorKind::kUsage, "a TCP network cannot have rank " + std::to_string(options.rank) + " of " +
                                       std::to_string(options.size) + ", " +
                                       std::to_string(options.channels) + " channels, " +
                                       std::to_string(options.connections_per_interface) +
                                       " connections per interface and a heartbeat of " +
                                       std::to_string(options.heartbeat) + " s");
  if (!between(options.handshake_seconds, kShortestHandshake, kLongestSeconds) || options.max_strangers < 1 ||
      !between(options.spin_microseconds, 0.0, kLongestSeconds * 1e6))
    throw Error(ErrorKind::kUsage, "a TCP network cannot allow " + std::to_string(options.handshake_seconds) +
                                       " s for a handshake, " + std::to_string(options.max_strangers) +
                                       " strangers and " + std::to_string(options.spin_microseconds) +
                                       " microseconds of spinning");
}

}  // namespace

std::uint64_t settings_of(const TcpOptions& options) {
  return static_cast<std::uint64_t>(options.channels) |
         static_cast<std::uint64_t>(options.connections_per_interface) << 32U |
         static_cast<std::uint64_t>(kProtocol) << 40U;
}

TcpNetwork::TcpNetwork(Store& store, const TcpOptions& options)
    : store_(store),
      options_((check(options), options)),
      settings_(settings_of(options)),
      own_{host_name(), ::getpid(),
           choose_addresses(interface_addresses(), options.interfaces, options.local)},
      poller_(descriptors_),
      door_(descriptors_, poller_,
            {derive_handshake_key(options.secret, options.job), options.handshake_seconds, options.heartbeat,
             options.max_strangers, options.open_handshakes},
            *this),
      peers_(static_cast<std::size_t>(options.size)) {
  door_.listen(own_.addresses);
  store_.set(store_key(options_, options_.rank), format_endpoint(own_));
}

void TcpNetwork::connect(std::span<const Link> links, const Waiting& waiting) {
  waiting.deadline.start();
  for (const Link& link : links) check_link(link);
  for (const Link& link : links)
    if (link.peer < options_.rank) find(link.peer, waiting);
  std::list<Call> calls;
  // They belong to this function, however it ends.
  struct Forget {
    TcpNetwork& network;
    const std::list<Call>& calls;
    ~Forget() {
      const std::lock_guard lock(network.mutex_);
      for (const Call& call : calls) network.door_.forget(call);
    }
  } const forget{*this, calls};
  {
    const std::lock_guard lock(mutex_);
    if (left_) throw left_error(ErrorKind::kInternal);
    calls = missing_calls(links, false);
    for (Call& call : calls) door_.call(call);
  }
  std::optional<Error> error;
  const WaitResult result = drive(waiting, [&](WaitResult*) {
    if (std::all_of(links.begin(), links.end(), [&](const Link& link) { return ready(link); })) return true;
    error = trouble(links, calls, waiting);
    return error.has_value();
  });
  if (result.outcome == WaitResult::Outcome::kCancelled)
    throw Error(ErrorKind::kAborted, "connecting was cancelled: the communicator is being closed");
  if (result.ok() && !error) return;
  const auto compose = [&] {
    const std::lock_guard lock(mutex_);
    if (result.ok()) return trouble(links, calls, waiting).value_or(*error);
    return timeout_error(links, calls, waiting);
  };
  error = compose();
  // Its host is asked for without the lock; the second text names it.
  if (error->context().peer >= 0 && !host(error->context().peer).empty()) error = compose();
  const std::lock_guard lock(mutex_);
  std::erase_if(complaints_, [&](const auto& complaint) { return concerns(complaint.first, links); });
  throw *error;
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

bool TcpNetwork::ready(const Link& link) const {
  const Peer& other = peer(link.peer);
  const auto found = other.streams.find(link.channel);
  return other.control && found != other.streams.end() && found->second->complete();
}

TwoEnds TcpNetwork::ends(int rank, double waited) const {
  return {options_.rank,   own_.host, rank, known_host(rank), waited, world_rank(options_.rank),
          world_rank(rank)};
}

int TcpNetwork::world_rank(int rank) const {
  const bool known = rank >= 0 && static_cast<std::size_t>(rank) < options_.world.size();
  return known ? options_.world[static_cast<std::size_t>(rank)] : rank;
}

Error TcpNetwork::left_error(ErrorKind kind) const {
  return Error(kind, "rank " + std::to_string(world_rank(options_.rank)) +
                         " has left and connects with nobody any more");
}

std::string TcpNetwork::known_host(int rank) const {
  if (rank == options_.rank) return own_.host;
  if (rank < 0 || rank >= options_.size) return "";
  return peer(rank).endpoint ? peer(rank).endpoint->host : peer(rank).address;
}

std::string TcpNetwork::host(int rank) {
  {
    const std::lock_guard lock(mutex_);
    if (rank < 0 || rank >= options_.size || rank == options_.rank || peer(rank).endpoint)
      return known_host(rank);
  }
  std::optional<Endpoint> endpoint;
  try {
    endpoint = parse_endpoint(store_.get(store_key(options_, rank), 0.0));
  } catch (const Error&) {
    // It has told none, or the store has gone: who asks has a message to write in spite of that.
  }
  const std::lock_guard lock(mutex_);
  if (!peer(rank).endpoint) peer(rank).endpoint = std::move(endpoint);
  return known_host(rank);
}

// Others are let in meanwhile: they may be what the peer waits for.
void TcpNetwork::find(int rank, const Waiting& waiting) {
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (peer(rank).endpoint) return;
    }
    std::string value;
    try {
      value = store_.get(store_key(options_, rank), std::min(kLookupSlice, waiting.deadline.remaining()));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
      progress();
      waiting.check_interrupt();
      if (waiting.cancelled != nullptr && waiting.cancelled->load(std::memory_order_acquire))
        throw Error(ErrorKind::kAborted, "connecting was cancelled: the communicator is being closed");
      const std::lock_guard lock(mutex_);
      if (abort_) throw Error(abort_->kind, abort_->message);
      if (left_) throw left_error(ErrorKind::kAborted);
      if (waiting.deadline.expired())
        throw error_between(
            ErrorKind::kTimeout, ends(rank, waiting.deadline.elapsed()), "waited for",
            ", which has told no address: it has not started, has failed before, or was given "
            "another store. Look at its output; MULTIRING_TIMEOUT sets how long to wait");
      continue;
    }
    const std::lock_guard lock(mutex_);
    peer(rank).endpoint = parse_endpoint(value);
    if (!peer(rank).endpoint)
      throw Error(ErrorKind::kInternal, "the store has no address of rank " + std::to_string(rank) +
                                            " that can be read: does it run another version of multiring?");
  }
}

/// `of_both`: also those that the peer would make if it connected, too.
std::list<Call> TcpNetwork::missing_calls(std::span<const Link> links, bool of_both) const {
  std::list<Call> calls;
  std::set<std::pair<int, int>> planned;
  for (const Link& link : links) {
    if ((link.peer > options_.rank && !of_both) || ready(link)) continue;
    if (lacks_control(peer(link.peer)) && planned.insert({link.peer, HelloFacts::kControl}).second)
      plan_calls(link.peer, HelloFacts::kControl, calls);
    if (planned.insert({link.peer, link.channel}).second) plan_calls(link.peer, link.channel, calls);
  }
  return calls;
}

void TcpNetwork::plan_calls(int rank, int channel, std::list<Call>& calls) const {
  const auto& theirs = peer(rank).endpoint->addresses;
  // Whoever calls, stripes have the same numbers.
  const bool higher = options_.rank > rank;
  std::vector<AddressPair> pairs =
      higher ? pair_addresses(own_.addresses, theirs) : pair_addresses(theirs, own_.addresses);
  if (!higher)
    for (AddressPair& pair : pairs) std::swap(pair.caller, pair.listener);
  if (pairs.empty())
    throw error_between(
        ErrorKind::kUsage, ends(rank, 0.0), "has no address of the family (IPv4, IPv6) of any of",
        ": " + own_.addresses.front().address.host_text() + " and " + theirs.front().address.host_text() +
            ". Choose interfaces of a network that both share with MULTIRING_INTERFACES");
  const bool control = channel == HelloFacts::kControl;
  const int each = control ? 1 : options_.connections_per_interface;
  pairs.resize(
      std::min<std::size_t>(pairs.size(), control ? 1 : static_cast<std::size_t>(kMaxStripes / each)));
  const bool speeds_known = std::all_of(pairs.begin(), pairs.end(), [&](const AddressPair& pair) {
    return own_.addresses[pair.caller].megabits > 0 && theirs[pair.listener].megabits > 0;
  });
  const auto stripes = static_cast<std::int32_t>(pairs.size()) * each;
  std::int32_t stripe = 0;
  for (const AddressPair& pair : pairs) {
    const InterfaceAddress& from = own_.addresses[pair.caller];
    const InterfaceAddress& to = theirs[pair.listener];
    const std::uint32_t weight = speeds_known ? std::min(from.megabits, to.megabits) : 1;
    for (int i = 0; i < each; ++i, ++stripe) {
      const HelloFacts facts{options_.rank, rank, options_.size, channel, stripe, stripes, weight, settings_};
      // Those that were made by an earlier attempt stay, and those that are under way.
      const bool made = !control && stands(facts, rank);
      if (!made && !is_calling(facts)) calls.push_back({facts, from, to});
    }
  }
}

Verdict TcpNetwork::judge(const HelloFacts& facts) {
  if (facts.size != options_.size || facts.settings != settings_ || facts.stripes < 1 ||
      facts.stripes > kMaxStripes || facts.stripe < 0 || facts.stripe >= facts.stripes || facts.weight == 0 ||
      facts.channel < HelloFacts::kControl || facts.channel >= options_.channels)
    return complain(facts, Verdict::kOtherSettings);
  if (facts.listener != options_.rank || facts.caller == options_.rank || facts.caller < 0 ||
      facts.caller >= options_.size)
    return Verdict::kWrongRank;
  HelloFacts other_way = facts;
  std::swap(other_way.caller, other_way.listener);
  if (facts.caller < options_.rank && (is_calling(other_way) || stands(facts, facts.caller)))
    return Verdict::kCrossed;
  const Peer& caller = peer(facts.caller);
  if (facts.channel == HelloFacts::kControl)
    return complain(facts, lacks_control(caller) ? Verdict::kWelcome : Verdict::kDuplicate);
  const auto found = caller.streams.find(facts.channel);
  if (found == caller.streams.end()) return Verdict::kWelcome;
  const auto stripe = static_cast<std::size_t>(facts.stripe);
  const bool fits = found->second->stripes() == static_cast<std::size_t>(facts.stripes);
  return complain(facts, fits && !found->second->has_link(stripe) ? Verdict::kWelcome : Verdict::kDuplicate);
}

// An attempt to connect that was given up may have left the end of its control connection behind.
bool TcpNetwork::lacks_control(const Peer& peer) {
  if (!peer.control) return true;
  return !peer.control->open() && !peer.left &&
         std::none_of(peer.streams.begin(), peer.streams.end(),
                      [](const auto& stream) { return stream.second->complete(); });
}

// Both sides tell of what keeps them apart.
Verdict TcpNetwork::complain(const HelloFacts& facts, Verdict verdict) {
  if (verdict != Verdict::kWelcome) complaints_[facts.caller] = verdict;
  return verdict;
}

// Whether what is wrong with a rank is in the way of `links`. A number that is no rank's is in everybody's.
bool TcpNetwork::concerns(int rank, std::span<const Link> links) const {
  return rank < 0 || rank >= options_.size ||
         std::any_of(
             links.begin(), links.end(), [&](const Link& link) { return link.peer == rank && !ready(link); });
}

void TcpNetwork::enter(const HelloFacts& facts, Descriptor socket, bool called) {
  const int rank = called ? facts.listener : facts.caller;
  Peer& other = peer(rank);
  arrivals_.fetch_add(1, std::memory_order_release);
  other.address = remote_host(socket.get());
  set_no_delay(socket.get());
  set_heartbeat(socket.get(), options_.heartbeat, options_.heartbeat * TcpOptions::kPatience,
                facts.channel == HelloFacts::kControl);
  const std::string path = path_of(socket.get());
  if (facts.channel == HelloFacts::kControl) {
    if (other.control) {  // of an attempt that was given up; events may be on their way to it
      other.replaced_controls.push_back(std::move(other.control));
      other.ending.reset();
      other.dead = false;
      std::erase(ending_, rank);
    }
    other.control = std::make_unique<ControlLink>(std::move(socket), rank, options_.size,
                                                  static_cast<ControlObserver&>(*this));
    other.control->path = path;
    poller_.add(other.control->socket(), *other.control);
    if (abort_) other.control->say(encode_abort(*abort_));
    return;
  }
  auto& stream = other.streams[facts.channel];
  if (!stream)
    stream = std::make_unique<TcpStream>(options_.rank, rank, facts.channel,
                                         static_cast<std::size_t>(facts.stripes), options_.whole_below);
  DataLink& link =
      stream->add_link(static_cast<std::size_t>(facts.stripe), facts.weight, std::move(socket), *this);
  link.path = path;
  poller_.add(link.socket(), link);
}

std::optional<Error> TcpNetwork::trouble(std::span<const Link> links, const std::list<Call>& calls,
                                         const Waiting& waiting) const {
  const double waited = waiting.deadline.elapsed();
  if (abort_) return Error(abort_->kind, abort_->message);
  if (left_) return left_error(ErrorKind::kAborted);
  for (const auto& [rank, verdict] : complaints_)
    if (concerns(rank, links)) return caller_error(ends(rank, waited), verdict);
  for (const Call& call : calls)
    if (call.state == Call::State::kFailed && !peer(call.facts.listener).left &&
        concerns(call.facts.listener, links))
      return call_error(ends(call.facts.listener, waited), call);
  for (const Link& link : links) {
    if (ready(link) || !(peer(link.peer).ending || peer(link.peer).left)) continue;
    // What it answered before its end may be on its way.
    const bool calling = std::any_of(calls.begin(), calls.end(), [&](const Call& call) {
      return call.facts.listener == link.peer && call.state != Call::State::kDone &&
             call.state != Call::State::kFailed;
    });
    if (!calling)
      return error_between(ErrorKind::kPeerLost, ends(link.peer, waited), "lost its connection to",
                           peer(link.peer).left ? ", which has left" : ": it has ended, look at its output");
  }
  return std::nullopt;
}

Error TcpNetwork::timeout_error(std::span<const Link> links, const std::list<Call>& calls,
                                const Waiting& waiting) const {
  const double waited = waiting.deadline.elapsed();
  for (const Call& call : calls)
    if (call.state != Call::State::kDone)
      return error_between(ErrorKind::kTimeout, ends(call.facts.listener, waited),
                           "waited for a connection to", ": " + call_progress(call));
  const auto absent =
      std::find_if(links.begin(), links.end(), [&](const Link& link) { return !ready(link); });
  const std::uint64_t unproven = door_.strangers().unproven;
  return error_between(
      ErrorKind::kTimeout, ends(absent->peer, waited), "waited for a connection from",
      " at " + own_.addresses.front().address.text() +
          ": it has not come so far, or cannot reach this address" +
          (unproven == 0 ? "" : "; " + std::to_string(unproven) + " callers did not know the job's secret"));
}

}  // namespace multiring::tcp
