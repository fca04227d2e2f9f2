#include "transport/world/networks.h"

#include <algorithm>
#include <array>

#include "transport/mpi/mpi_network.h"
#include "transport/tcp/tcp_network.h"

namespace multiring {
namespace {

ClusterContext::MakeNetwork mpi_maker(const std::shared_ptr<Store>& /*store*/, const WorldAddress& address,
                                      const MetRanks& ranks) {
  return [session = address.mpi, ranks](std::span<const int> members, int rank, int channels,
                                        const std::string& name, bool, const WaitOptions&) {
    MpiOptions options;
    options.rank = rank;
    options.members.assign(members.begin(), members.end());
    for (const int member : members) options.hosts.push_back(ranks.hosts[static_cast<std::size_t>(member)]);
    options.channels = channels;
    options.name = ranks.job + "/" + name;
    return std::make_unique<MpiNetwork>(session, std::move(options));
  };
}

ClusterContext::MakeNetwork tcp_maker(const std::shared_ptr<Store>& store, const WorldAddress& address,
                                      const MetRanks& ranks) {
  if (address.secret.empty())
    throw_usage(
        "the ranks are on several hosts, and MULTIRING_SECRET is not set: without it any process could join "
        "the job. Set it to the same 32 hexadecimal digits or more on all ranks");
  TcpOptions base(address);
  base.secret = address.secret;
  base.local = ranks.local;
  // Whatever the interfaces are by then, they were good when the ranks met.
  tcp::choose_addresses(tcp::interface_addresses(), base.interfaces, base.local);
  base.connected_before = true;
  return [store, base, job = ranks.job](std::span<const int> members, int rank, int channels,
                                        const std::string& name, bool in_store, const WaitOptions& waiting) {
    TcpOptions options = base;
    options.rank = rank;
    options.size = static_cast<int>(members.size());
    options.world.assign(members.begin(), members.end());
    options.channels = channels;
    options.job = job + "/" + name;
    return std::make_unique<TcpNetwork>(in_store ? store.get() : nullptr, options, waiting);
  };
}

constexpr std::array<NetworkKind, 2> kNetworks{{
    {"mpi", [](const WorldAddress& address) { return address.mpi != nullptr; }, &mpi_maker},
    {"tcp", [](const WorldAddress&) { return true; }, &tcp_maker},
}};

}  // namespace

const NetworkKind& network_kind(const WorldAddress& address) {
  return *std::find_if(kNetworks.begin(), kNetworks.end(),
                       [&](const NetworkKind& kind) { return kind.is_chosen(address); });
}

}  // namespace multiring
