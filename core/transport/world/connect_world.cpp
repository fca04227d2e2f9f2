#include "transport/world/connect_world.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>
#include <utility>

#include "base/host_identity.h"
#include "transport/cluster/cluster_transport.h"
#include "transport/mpi/mpi_network.h"
#include "transport/shm/shm_transport.h"
#include "transport/tcp/tcp_network.h"

namespace multiring {
namespace {

/// What a rank tells of itself, one line each.
struct Card {
  std::string build;    ///< version of the library and of what it speaks
  std::string boot;     ///< of the kernel: the same on a machine
  std::string network;  ///< devices that it has
  std::string host;     ///< given by the user
  std::string job;      ///< as this host's launcher names it: not the same on others
  std::string mode;
  std::string tuning;
  std::string engine;  ///< "tcp" or "mpi"
  std::string wire;
  std::string name;
  std::int64_t process_id = 0;

  std::string text() const {
    std::string lines;
    for (const std::string* line :
         {&build, &boot, &network, &host, &job, &mode, &tuning, &engine, &wire, &name})
      lines += *line + "\n";
    return lines + std::to_string(process_id);
  }
  static Card parse(const std::string& text) {
    Card card;
    std::istringstream lines(text);
    std::string number;
    for (std::string* line : {&card.build, &card.boot, &card.network, &card.host, &card.job, &card.mode,
                              &card.tuning, &card.engine, &card.wire, &card.name, &number})
      std::getline(lines, *line);
    card.process_id = std::strtoll(number.c_str(), nullptr, 10);
    return card;
  }
  /// Ranks with the same key share memory.
  std::string memory() const { return boot + "\n" + (host.empty() ? network : "name " + host); }
};

class PrefixedStore final : public Store {
 public:
  PrefixedStore(Store& store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value) override { store_.set(prefix_ + key, value); }
  std::string get(const std::string& key, double seconds) override {
    return store_.get(prefix_ + key, seconds);
  }

 private:
  Store& store_;
  std::string prefix_;
};

[[noreturn]] void throw_missing(const WorldAddress& address, int peer, const Waiting& waiting) {
  const double waited = waiting.deadline.elapsed();
  ErrorContext context;
  context.rank = address.rank;
  context.peer = peer;
  context.host = host_name();
  context.operation = "init";
  context.elapsed = waited;
  throw Error(ErrorKind::kTimeout,
              "rank " + std::to_string(address.rank) + " on " + host_name() + " waited " +
                  std::to_string(static_cast<int>(waited)) + " s in init for rank " + std::to_string(peer) +
                  " of " + std::to_string(address.size) +
                  ": it has not started, has failed before init, or was given another store. Look at its "
                  "output; MULTIRING_TIMEOUT sets how long to wait.",
              context);
}

/// The value that rank `peer` sets.
std::string get(Store& store, const std::string& key, const WorldAddress& address, int peer,
                const Waiting& waiting) {
  constexpr double kSlice = 0.2;  // seconds between looks for Ctrl-C
  for (;;) {
    try {
      return store.get(key, std::min(kSlice, waiting.deadline.remaining()));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
    }
    waiting.check_interrupt();
    if (waiting.deadline.expired()) throw_missing(address, peer, waiting);
  }
}

void require_same(const std::vector<Card>& cards, int mine, const std::string& variable,
                  std::string Card::* setting) {
  const std::string& here = cards[static_cast<std::size_t>(mine)].*setting;
  for (std::size_t rank = 0; rank < cards.size(); ++rank)
    if (cards[rank].*setting != here)
      throw Error(ErrorKind::kUsage, "rank " + std::to_string(rank) + " has " + variable + "='" +
                                         cards[rank].*setting + "', rank " + std::to_string(mine) + " '" +
                                         here + "': it has to be the same on all ranks");
}

// Before anything else of another build's card is believed.
void require_same_build(const std::vector<Card>& cards, int mine) {
  const Card& here = cards[static_cast<std::size_t>(mine)];
  for (std::size_t rank = 0; rank < cards.size(); ++rank)
    if (const Card& there = cards[rank]; there.build != here.build)
      throw Error(ErrorKind::kUsage, "rank " + std::to_string(rank) + " on " + there.name + " runs " +
                                         there.build + ", rank " + std::to_string(mine) + " on " + here.name +
                                         " " + here.build +
                                         ": install the same version of multiring on all hosts");
}

std::vector<Card> exchange_cards(Store& store, const WorldAddress& address, const Waiting& waiting) {
  const std::string engine = address.mpi != nullptr ? "mpi" : "tcp";
  const Card mine{address.build, host_identity(), network_identity(), address.host,
                  address.job,   address.mode,    address.tuning,     engine,
                  address.wire,  host_name(),     ::getpid()};
  store.set("world/" + std::to_string(address.rank), mine.text());
  std::vector<Card> cards;
  for (int rank = 0; rank < address.size; ++rank)
    cards.push_back(Card::parse(get(store, "world/" + std::to_string(rank), address, rank, waiting)));
  require_same_build(cards, address.rank);
  require_same(cards, address.rank, "MULTIRING_MODE", &Card::mode);
  require_same(cards, address.rank, "MULTIRING_TUNING (what the file says)", &Card::tuning);
  require_same(cards, address.rank, "MULTIRING_TRANSPORT", &Card::engine);
  require_same(cards, address.rank, "MULTIRING_WIRE", &Card::wire);
  return cards;
}

/// Hosts are numbered by their first ranks.
std::vector<ClusterRank> find_places(const std::vector<Card>& cards) {
  std::map<std::string, int> numbers;
  std::vector<int> counts;
  std::vector<ClusterRank> places;
  for (const Card& card : cards) {
    const auto [found, is_new] = numbers.emplace(card.memory(), static_cast<int>(numbers.size()));
    if (is_new) counts.push_back(0);
    const int host = found->second;
    places.push_back({host, counts[static_cast<std::size_t>(host)]++, card.name, card.process_id});
  }
  return places;
}

std::shared_ptr<HostLink> link_host(Store& store, const WorldAddress& address,
                                    const std::vector<ClusterRank>& places, const Waiting& waiting) {
  const ClusterRank& mine = places[static_cast<std::size_t>(address.rank)];
  PrefixedStore local(store, "host-" + std::to_string(mine.host) + "/");
  PeerLinks::Options options;
  options.rank = mine.local;
  options.size = static_cast<int>(std::count_if(
      places.begin(), places.end(), [&](const ClusterRank& place) { return place.host == mine.host; }));
  options.socket_directory = address.socket_directory;
  options.settings = address.transport.staging_bytes;
  options.build = address.build;
  return make_shm_link(local, options, waiting);
}

/// Whether any host is, and whether all ranks have the same size of staging memory.
bool any_crowded(Store& store, const WorldAddress& address, const std::vector<ClusterRank>& places,
                 const HostLink& link, const Waiting& waiting) {
  const ClusterRank& mine = places[static_cast<std::size_t>(address.rank)];
  const std::string staging = std::to_string(address.transport.staging_bytes);
  if (mine.local == 0)
    store.set("host-" + std::to_string(mine.host), (link.size() > link.cores() ? "1 " : "0 ") + staging);
  bool crowded = false;
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    if (places[rank].local != 0) continue;
    const int peer = static_cast<int>(rank);
    const std::string told = get(store, "host-" + std::to_string(places[rank].host), address, peer, waiting);
    crowded = crowded || told[0] == '1';
    if (told.substr(2) != staging)
      throw Error(ErrorKind::kUsage, "rank " + std::to_string(peer) + " has MULTIRING_STAGING_BYTES=" +
                                         told.substr(2) + ", rank " + std::to_string(address.rank) + " " +
                                         staging + ": it has to be the same on all ranks");
  }
  return crowded;
}

ClusterContext::MakeNetwork network_maker(const std::shared_ptr<MpiSession>& session,
                                          const std::vector<Card>& cards) {
  std::vector<std::string> names;
  for (const Card& card : cards) names.push_back(card.name);
  return [session, names, job = cards.front().job](std::span<const int> members, int rank, int channels,
                                                   const std::string& name) {
    MpiOptions options;
    options.rank = rank;
    options.members.assign(members.begin(), members.end());
    for (const int member : members) options.hosts.push_back(names[static_cast<std::size_t>(member)]);
    options.channels = channels;
    options.name = job + "/" + name;
    return std::make_unique<MpiNetwork>(session, std::move(options));
  };
}

ClusterContext::MakeNetwork network_maker(const std::shared_ptr<Store>& store, const WorldAddress& address,
                                          const std::vector<Card>& cards) {
  if (address.mpi != nullptr) return network_maker(address.mpi, cards);
  TcpOptions base;
  base.secret = address.secret;
  base.interfaces = address.interfaces;
  const Card& mine = cards[static_cast<std::size_t>(address.rank)];
  base.local = std::all_of(cards.begin(), cards.end(), [&](const Card& card) {
    return card.boot == mine.boot && card.network == mine.network;
  });
  return [store, base, job = cards.front().job](std::span<const int> members, int rank, int channels,
                                                const std::string& name) {
    TcpOptions options = base;
    options.rank = rank;
    options.size = static_cast<int>(members.size());
    options.world.assign(members.begin(), members.end());
    options.channels = channels;
    options.job = job + "/" + name;
    return std::make_unique<TcpNetwork>(*store, options);
  };
}

}  // namespace

std::shared_ptr<Transport> connect_world(const std::shared_ptr<Store>& store, const WorldAddress& address,
                                         const Waiting& waiting) {
  std::vector<Card> cards;
  std::vector<ClusterRank> places;
  if (address.spread) {
    waiting.deadline.start();
    cards = exchange_cards(*store, address, waiting);
    places = find_places(cards);
  }
  const auto elsewhere = [&](const ClusterRank& place) { return place.host != places.front().host; };
  if (std::none_of(places.begin(), places.end(), elsewhere)) {
    ShmOptions options{address.rank, address.size, address.socket_directory, address.transport,
                       address.build};
    return connect_shm(*store, options, waiting);
  }
  if (address.secret.empty() && address.mpi == nullptr)
    throw Error(
        ErrorKind::kUsage,
        "the ranks are on several hosts, and MULTIRING_SECRET is not set: without it anybody could join "
        "the job. Set it to the same 32 hexadecimal digits or more on all ranks");
  auto context = std::make_shared<ClusterContext>();
  context->rank = address.rank;
  const int host = places[static_cast<std::size_t>(address.rank)].host;
  context->link = std::make_shared<MailHostLink>(link_host(*store, address, places, waiting),
                                                 ranks_of_host(places, host), context->mails);
  context->make_network = network_maker(store, address, cards);
  SharedTransportOptions options = address.transport;
  options.crowded = any_crowded(*store, address, places, *context->link, waiting);
  context->ranks = std::move(places);
  std::vector<int> members(static_cast<std::size_t>(address.size));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<ClusterTransport>(std::move(context), std::move(members), 1, options, waiting);
}

}  // namespace multiring
