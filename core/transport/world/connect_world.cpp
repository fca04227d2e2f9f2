#include "transport/world/connect_world.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include "base/host_identity.h"
#include "base/text.h"
#include "transport/cluster/cluster_transport.h"
#include "transport/shm/shm_transport.h"
#include "transport/world/init_warning.h"
#include "transport/world/networks.h"

namespace multiring {
namespace {

/// What a rank publishes about itself, one line each.
struct RankInfo {
  std::string build;    ///< versions of the library and its protocol
  std::string name;     ///< of the host; these two stay first in every version, for an error tells them
  std::string boot;     ///< of the kernel: the same on a machine
  std::string network;  ///< its devices
  std::string host;     ///< given by the user
  std::string job;      ///< named by the launcher of this host: may differ on others
  std::int64_t process_id = 0;
  std::vector<std::string> compared;  ///< values of WorldAddress::compared

  std::string text() const {
    std::string lines;
    for (const std::string* line : {&build, &name, &boot, &network, &host, &job}) lines += *line + "\n";
    lines += std::to_string(process_id);
    for (const std::string& value : compared) lines += "\n" + value;
    return lines;
  }
  static RankInfo parse(const std::string& text) {
    RankInfo info;
    std::istringstream lines(text);
    std::string number;
    for (std::string* line :
         {&info.build, &info.name, &info.boot, &info.network, &info.host, &info.job, &number})
      std::getline(lines, *line);
    info.process_id = std::strtoll(number.c_str(), nullptr, 10);
    for (std::string value; std::getline(lines, value);) info.compared.push_back(value);
    return info;
  }
  /// Ranks with the same key share memory.
  std::string memory() const { return boot + "\n" + (host.empty() ? network : "name " + host); }
};

class PrefixedStore final : public Store {
 public:
  PrefixedStore(Store& store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value, const WaitOptions& waiting) override {
    store_.set(prefix_ + key, value, waiting);
  }
  std::string get(const std::string& key, double seconds, const WaitOptions& waiting) override {
    return store_.get(prefix_ + key, seconds, waiting);
  }

 private:
  Store& store_;
  std::string prefix_;
};

[[noreturn]] void throw_missing(const WorldAddress& address, int peer, const WaitOptions& waiting) {
  const double waited = waiting.deadline.elapsed();
  ErrorContext context;
  context.rank = address.rank;
  context.peer = peer;
  context.host = host_name();
  context.operation = "init";
  context.elapsed = waited;
  throw Error(ErrorKind::kTimeout,
              "rank " + std::to_string(address.rank) + " on " + host_name() + " waited " +
                  std::to_string(static_cast<int>(waited)) + " s in init for " +
                  missing_ranks(address, {peer}) +
                  ": it has not started, has failed before init, or was given another store. Look at its "
                  "output; MULTIRING_TIMEOUT sets how long to wait.",
              context);
}

/// The value that rank `peer` sets.
std::string get(Store& store, const std::string& key, const WorldAddress& address, int peer,
                const WaitOptions& waiting) {
  constexpr double kTimeSlice = 0.2;  // seconds between checks for interrupts
  for (;;) {
    try {
      return store.get(key, std::min(kTimeSlice, waiting.deadline.remaining()), waiting);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
    }
    waiting.check_interrupt();
    if (waiting.deadline.expired()) throw_missing(address, peer, waiting);
  }
}

void require_same(const std::vector<RankInfo>& infos, int mine, const std::vector<std::string>& names) {
  const auto value = [&](std::size_t rank, std::size_t index) {
    const std::vector<std::string>& values = infos[rank].compared;
    return index < values.size() ? values[index] : std::string();
  };
  for (std::size_t index = 0; index < names.size(); ++index) {
    const std::string here = value(static_cast<std::size_t>(mine), index);
    for (std::size_t rank = 0; rank < infos.size(); ++rank)
      if (value(rank, index) != here)
        throw Error(ErrorKind::kUsage, "rank " + std::to_string(rank) + " has " + names[index] + "='" +
                                           value(rank, index) + "', rank " + std::to_string(mine) + " '" +
                                           here + "': it has to be the same on all ranks");
  }
}

// First: another build may publish other fields.
void require_same_build(const std::vector<RankInfo>& infos, int mine) {
  const RankInfo& here = infos[static_cast<std::size_t>(mine)];
  for (std::size_t rank = 0; rank < infos.size(); ++rank)
    if (const RankInfo& there = infos[rank]; there.build != here.build)
      throw Error(ErrorKind::kUsage, "rank " + std::to_string(rank) + " on " + there.name + " runs " +
                                         there.build + ", rank " + std::to_string(mine) + " on " + here.name +
                                         " " + here.build +
                                         ": install the same version of multiring on all hosts");
}

std::vector<RankInfo> exchange_infos(Store& store, const WorldAddress& address, const WaitOptions& waiting) {
  RankInfo mine{address.build, host_name(), host_identity(), network_identity(),
                address.host,  address.job, ::getpid(),      {}};
  std::vector<std::string> names{"MULTIRING_TRANSPORT"};
  mine.compared = {network_kind(address).name};
  for (const auto& [name, value] : address.compared) {
    names.push_back(name);
    mine.compared.push_back(value);
  }
  store.set("world/" + std::to_string(address.rank), mine.text(), waiting);
  std::vector<RankInfo> infos;
  for (int rank = 0; rank < address.size; ++rank)
    infos.push_back(RankInfo::parse(get(store, "world/" + std::to_string(rank), address, rank, waiting)));
  require_same_build(infos, address.rank);
  require_same(infos, address.rank, names);
  return infos;
}

/// Numbers hosts in the order of their first ranks.
std::vector<ClusterRank> place_ranks(const std::vector<RankInfo>& infos) {
  std::map<std::string, int> numbers;
  std::vector<int> counts;
  std::vector<ClusterRank> ranks;
  for (const RankInfo& info : infos) {
    const auto [found, is_new] = numbers.emplace(info.memory(), static_cast<int>(numbers.size()));
    if (is_new) counts.push_back(0);
    const int host = found->second;
    ranks.push_back({host, counts[static_cast<std::size_t>(host)]++, info.name, info.process_id});
  }
  return ranks;
}

std::shared_ptr<HostGroup> connect_host(Store& store, const WorldAddress& address,
                                        const std::vector<ClusterRank>& ranks, const WaitOptions& waiting) {
  const ClusterRank& own = ranks[static_cast<std::size_t>(address.rank)];
  PrefixedStore local(store, "host-" + std::to_string(own.host) + "/");
  SocketMesh::Options options;
  options.rank = own.local;
  options.size = static_cast<int>(std::count_if(
      ranks.begin(), ranks.end(), [&](const ClusterRank& rank) { return rank.host == own.host; }));
  options.socket_directory = address.socket_directory;
  options.settings = address.transport.staging_bytes;
  options.build = address.build;
  return make_shm_group(local, options, waiting);
}

/// Whether any host is oversubscribed. Raises an error unless all ranks have the same size of staging memory.
bool any_oversubscribed(Store& store, const WorldAddress& address, const std::vector<ClusterRank>& ranks,
                        const HostGroup& group, const WaitOptions& waiting) {
  const ClusterRank& own = ranks[static_cast<std::size_t>(address.rank)];
  const std::string staging = std::to_string(address.transport.staging_bytes);
  if (own.local == 0)
    store.set("host-" + std::to_string(own.host), (group.size() > group.cores() ? "1 " : "0 ") + staging,
              waiting);
  bool oversubscribed = false;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].local != 0) continue;
    const int peer = static_cast<int>(rank);
    const std::string published =
        get(store, "host-" + std::to_string(ranks[rank].host), address, peer, waiting);
    oversubscribed = oversubscribed || published[0] == '1';
    if (published.substr(2) != staging)
      throw Error(ErrorKind::kUsage, "rank " + std::to_string(peer) + " has MULTIRING_STAGING_BYTES=" +
                                         published.substr(2) + ", rank " + std::to_string(address.rank) +
                                         " " + staging + ": it has to be the same on all ranks");
  }
  return oversubscribed;
}

MetRanks met_ranks(const std::vector<RankInfo>& infos, int own) {
  const RankInfo& mine = infos[static_cast<std::size_t>(own)];
  MetRanks ranks;
  for (const RankInfo& info : infos) ranks.hosts.push_back(info.name);
  ranks.job = infos.front().job;
  ranks.local = std::all_of(infos.begin(), infos.end(), [&](const RankInfo& info) {
    return info.boot == mine.boot && info.network == mine.network;
  });
  return ranks;
}

}  // namespace

std::string missing_ranks(const WorldAddress& address, const std::vector<int>& missing) {
  std::string on;
  std::set<std::string> hosts;
  if (address.hosts.size() == static_cast<std::size_t>(address.size))
    for (const int rank : missing)
      if (const std::string& host = address.hosts[static_cast<std::size_t>(rank)]; hosts.insert(host).second)
        on += (on.empty() ? " (on " : ", ") + host;
  return rank_list(missing) + " of " + std::to_string(address.size) + on + (on.empty() ? "" : ")");
}

std::shared_ptr<Transport> connect_world(const std::shared_ptr<Store>& store, const WorldAddress& address,
                                         const WaitOptions& limits) {
  InitWarning warning(*store, address, address.spread ? "world/" : "shm/");
  const std::function<void()> check = [&] {
    limits.check_interrupt();
    warning.check(limits.deadline.elapsed());
  };
  const WaitOptions waiting = limits.with_interrupt(check);
  std::vector<RankInfo> infos;
  std::vector<ClusterRank> ranks;
  if (address.spread) {
    infos = exchange_infos(*store, address, waiting);
    ranks = place_ranks(infos);
  }
  const auto is_on_another_host = [&](const ClusterRank& rank) { return rank.host != ranks.front().host; };
  if (std::none_of(ranks.begin(), ranks.end(), is_on_another_host)) {
    ShmOptions options{address.rank, address.size, address.socket_directory, address.transport,
                       address.build};
    return connect_shm(*store, options, waiting);
  }
  auto make_network = network_kind(address).maker(store, address, met_ranks(infos, address.rank));
  auto context = std::make_shared<ClusterContext>();
  context->rank = address.rank;
  const int host = ranks[static_cast<std::size_t>(address.rank)].host;
  context->host_group = std::make_shared<PollingHostGroup>(connect_host(*store, address, ranks, waiting),
                                                           ranks_of_host(ranks, host), context->progress);
  context->make_network = std::move(make_network);
  SharedTransportOptions options = address.transport;
  options.oversubscribed = any_oversubscribed(*store, address, ranks, *context->host_group, waiting);
  context->ranks = std::move(ranks);
  return ClusterTransport::make_world(std::move(context), options, waiting);
}

}  // namespace multiring
