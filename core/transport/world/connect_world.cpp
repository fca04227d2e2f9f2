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

/// What a rank publishes about itself: versions of the library, the name of its host, and lines of
/// name=value. The first two stay first in every version, for an error tells them.
class RankInfo {
 public:
  // Names beside those of the settings.
  static constexpr const char* kBuild = "build";  // versions of the library and its protocol
  static constexpr const char* kHost = "host";
  static constexpr const char* kBoot = "boot";        // of the kernel: the same on a machine
  static constexpr const char* kNetwork = "network";  // its devices
  static constexpr const char* kGivenHost = "MULTIRING_HOST";
  static constexpr const char* kJob = "job";  // named by the launcher of this host: may differ on others
  static constexpr const char* kProcess = "process";

  explicit RankInfo(std::map<std::string, std::string> values) : values_(std::move(values)) {}

  std::string text() const {
    std::string lines = get(kBuild) + "\n" + get(kHost) + "\n";
    for (const auto& [name, value] : values_)
      if (name != kBuild && name != kHost) lines += name + "=" + value + "\n";
    return lines;
  }
  static RankInfo parse(const std::string& text) {
    std::map<std::string, std::string> values;
    std::istringstream lines(text);
    for (const char* name : {kBuild, kHost}) std::getline(lines, values[name]);
    for (std::string line; std::getline(lines, line);) {
      const std::size_t end = std::min(line.find('='), line.size());
      values[line.substr(0, end)] = line.substr(std::min(end + 1, line.size()));
    }
    return RankInfo(std::move(values));
  }
  /// Empty: it has published none.
  std::string get(const std::string& name) const {
    const auto found = values_.find(name);
    return found == values_.end() ? std::string() : found->second;
  }
  /// Ranks with the same key share memory.
  std::string memory() const {
    const std::string given = get(kGivenHost);
    return get(kBoot) + "\n" + (given.empty() ? get(kNetwork) : "name " + given);
  }

 private:
  std::map<std::string, std::string> values_;
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

void require_same(const std::vector<RankInfo>& infos, int mine, const std::string& name) {
  const std::string here = infos[static_cast<std::size_t>(mine)].get(name);
  for (std::size_t rank = 0; rank < infos.size(); ++rank)
    if (const std::string there = infos[rank].get(name); there != here)
      throw_usage("rank " + std::to_string(rank) + " has " + name +
                  (name == "MULTIRING_TUNING" ? " (what the file says)" : "") + "='" + there + "', rank " +
                  std::to_string(mine) + " '" + here + "': it has to be the same on all ranks");
}

void require_same_build(const std::vector<RankInfo>& infos, int mine) {
  const RankInfo& here = infos[static_cast<std::size_t>(mine)];
  for (std::size_t rank = 0; rank < infos.size(); ++rank)
    if (const RankInfo& there = infos[rank]; there.get(RankInfo::kBuild) != here.get(RankInfo::kBuild))
      throw_usage("rank " + std::to_string(rank) + " on " + there.get(RankInfo::kHost) + " runs " +
                  there.get(RankInfo::kBuild) + ", rank " + std::to_string(mine) + " on " +
                  here.get(RankInfo::kHost) + " " + here.get(RankInfo::kBuild) +
                  ": install the same version of multiring on all hosts");
}

std::vector<RankInfo> exchange_infos(Store& store, const WorldAddress& address, const WaitOptions& waiting) {
  std::map<std::string, std::string> compared = values_of_job(address);
  compared["MULTIRING_TRANSPORT"] = network_kind(address).name;
  std::map<std::string, std::string> values = compared;
  values.insert({{RankInfo::kBuild, address.build},
                 {RankInfo::kHost, host_name()},
                 {RankInfo::kBoot, host_identity()},
                 {RankInfo::kNetwork, network_identity()},
                 {RankInfo::kGivenHost, address.host},
                 {RankInfo::kJob, address.job},
                 {RankInfo::kProcess, std::to_string(::getpid())}});
  store.set("world/" + std::to_string(address.rank), RankInfo(std::move(values)).text(), waiting);
  std::vector<RankInfo> infos;
  for (int rank = 0; rank < address.size; ++rank)
    infos.push_back(RankInfo::parse(get(store, "world/" + std::to_string(rank), address, rank, waiting)));
  require_same_build(infos, address.rank);  // first: another build may have other settings
  for (const auto& [name, value] : compared) require_same(infos, address.rank, name);
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
    ranks.push_back({host, counts[static_cast<std::size_t>(host)]++, info.get(RankInfo::kHost),
                     std::strtoll(info.get(RankInfo::kProcess).c_str(), nullptr, 10)});
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
  options.settings = address.staging_bytes;
  options.build = address.build;
  return make_shm_group(local, options, waiting);
}

/// Whether any host is oversubscribed.
bool any_oversubscribed(Store& store, const WorldAddress& address, const std::vector<ClusterRank>& ranks,
                        const HostGroup& group, const WaitOptions& waiting) {
  const ClusterRank& own = ranks[static_cast<std::size_t>(address.rank)];
  const auto key = [](int host) { return "host-" + std::to_string(host); };
  if (own.local == 0) store.set(key(own.host), group.size() > group.cores() ? "1" : "0", waiting);
  bool oversubscribed = false;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].local == 0)
      oversubscribed |= get(store, key(ranks[rank].host), address, static_cast<int>(rank), waiting) == "1";
  return oversubscribed;
}

MetRanks met_ranks(const std::vector<RankInfo>& infos, int own) {
  const RankInfo& mine = infos[static_cast<std::size_t>(own)];
  MetRanks ranks;
  for (const RankInfo& info : infos) ranks.hosts.push_back(info.get(RankInfo::kHost));
  ranks.job = infos.front().get(RankInfo::kJob);
  ranks.local = std::all_of(infos.begin(), infos.end(), [&](const RankInfo& info) {
    return info.get(RankInfo::kBoot) == mine.get(RankInfo::kBoot) &&
           info.get(RankInfo::kNetwork) == mine.get(RankInfo::kNetwork);
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
    ShmOptions options{address.rank, address.size, address.socket_directory, SharedTransportOptions(address),
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
  context->host_links = address.host_links;
  SharedTransportOptions options(address);
  options.oversubscribed = any_oversubscribed(*store, address, ranks, *context->host_group, waiting);
  context->ranks = std::move(ranks);
  return ClusterTransport::make_world(std::move(context), options, waiting);
}

}  // namespace multiring
