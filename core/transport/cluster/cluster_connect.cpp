// How a ClusterTransport and its subgroups are built.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <thread>
#include <utility>

#include "base/host_links.h"
#include "transport/cluster/channels.h"
#include "transport/cluster/cluster_transport.h"

namespace multiring {
namespace {

const ClusterRank& rank_of(const ClusterContext& context, int world) {
  return context.ranks[static_cast<std::size_t>(world)];
}

/// Ranks of the members in the HostGroup of this host.
std::vector<int> group_ranks(const ClusterContext& context, const std::vector<int>& members) {
  std::vector<int> ranks;
  for (const int member : members) {
    const ClusterRank& rank = rank_of(context, member);
    const bool here = rank.host == rank_of(context, context.rank).host;
    ranks.push_back(here ? rank.local : SharedTransport::kRemote);
  }
  return ranks;
}

}  // namespace

std::vector<int> ranks_of_host(const std::vector<ClusterRank>& ranks, int host) {
  std::vector<int> found;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const ClusterRank& info = ranks[rank];
    if (info.host != host) continue;
    found.resize(std::max(found.size(), static_cast<std::size_t>(info.local) + 1), -1);
    found[static_cast<std::size_t>(info.local)] = static_cast<int>(rank);
  }
  return found;
}

ClusterTransport::ClusterTransport(std::shared_ptr<const ClusterContext> context, std::vector<int> members,
                                   std::uint64_t tag, bool in_store, const SharedTransportOptions& options,
                                   const WaitOptions& waiting)
    : SharedTransport(context->host_group, group_ranks(*context, members), tag, options, waiting),
      context_(std::move(context)),
      own_tag_(tag),
      world_(std::move(members)) {
  for (int other = 0; other < size(); ++other)
    if (is_remote(other)) remote_.push_back(other);
  find_links();
  network_ = make_network(in_store, waiting);
  mirror_ = make_mirror();
  hierarchy_ = make_hierarchy(waiting);
}

std::shared_ptr<ClusterTransport> ClusterTransport::make_world(std::shared_ptr<const ClusterContext> context,
                                                               const SharedTransportOptions& options,
                                                               const WaitOptions& waiting) {
  constexpr std::uint64_t kTag = 1;
  std::vector<int> members(context->ranks.size());
  std::iota(members.begin(), members.end(), 0);
  auto world = std::make_shared<ClusterTransport>(std::move(context), std::move(members), kTag,
                                                  /*in_store=*/true, options, waiting);
  world->connect(waiting);
  return world;
}

// The network before the memory of the host, in which it has receives posted.
ClusterTransport::~ClusterTransport() {
  if (messages_ != nullptr) ClusterTransport::leave();  // peers take who could not connect for dead
  progress_entry_.reset();
  hierarchy_.reset();
  messages_.reset();
  mirror_.reset();
  network_.reset();
}

std::unique_ptr<Network> ClusterTransport::make_network(bool in_store, const WaitOptions& waiting) const {
  char name[64];
  std::snprintf(name, sizeof name, "%016llx-%d", static_cast<unsigned long long>(own_tag_), world_[0]);
  auto network = context_->make_network(world_, rank(), kClusterChannels, name, in_store, waiting);
  network->keep(memory());
  return network;
}

void ClusterTransport::connect(const WaitOptions& waiting) {
  std::vector<Network::Link> links = mirror_->links();
  if (!network_->links_on_demand())
    for (const int other : remote_)
      for (const Network::Link& link : RemoteMessages::links_of(other)) links.push_back(link);
  network_->connect(links, waiting);
  open_messages();
  // Errors of this group must not end the waits of other groups.
  const auto poll = [this] {
    try {
      poll_own();
    } catch (const Error& error) {
      network_->abort(error);
    }
  };
  progress_entry_ = std::make_unique<ProgressRegistry::Entry>(context_->progress, poll);
}

/// Raises a usage error where the hosts of this group have no links by which all of them are reached.
void ClusterTransport::find_links() {
  if (context_->host_links == HostLinks::kSwitch) return;
  std::map<int, int> first;  // rank of each host
  for (int rank = 0; rank < size(); ++rank) first.emplace(host_number(rank), rank);
  for (auto one = first.begin(); one != first.end(); ++one)
    for (const auto& [number, other] : first) fully_linked_ = fully_linked_ && has_link(one->second, other);
  for (auto next = first.begin(), one = next++; next != first.end(); one = next++)
    if (!has_link(one->second, next->second))
      throw_usage("ranks " + std::to_string(world_rank(one->second)) + " on " + host(one->second) + " and " +
                  std::to_string(world_rank(next->second)) + " on " + host(next->second) +
                  " are in one group, but between their hosts are others (MULTIRING_HOST_LINKS=" +
                  host_links_name(context_->host_links) + "): a group needs hosts that are neighbours");
}

bool ClusterTransport::has_link(int rank, int other) const {
  if (context_->host_links == HostLinks::kSwitch) return true;
  int hosts = 0;
  for (const ClusterRank& each : context_->ranks) hosts = std::max(hosts, each.host + 1);
  return have_link(context_->host_links, hosts, host_number(rank), host_number(other));
}

MirrorRoutes ClusterTransport::routes_of(int rank) const {
  std::vector<int> hosts;
  for (int each = 0; each < size(); ++each) hosts.push_back(host_number(each));
  if (fully_linked_) return mirror_routes(hosts, rank, context_->direct_hosts);
  const auto [first, last] = std::ranges::minmax_element(hosts);
  return neighbour_routes(
      hosts, rank, has_link(static_cast<int>(first - hosts.begin()), static_cast<int>(last - hosts.begin())));
}

const std::map<int, MirrorRoutes>& ClusterTransport::host_routes() const {
  std::call_once(routes_made_, [this] {
    for (int here = 0; here < size(); ++here)
      if (!is_remote(here)) routes_.emplace(here, routes_of(here));
  });
  return routes_;
}

std::unique_ptr<HostMirror> ClusterTransport::make_mirror() {
  MirrorRoutes routes = routes_of(rank());
  receivers_ = std::move(routes.receivers);
  RoundMemory memory;
  memory.header = [this](int other, std::uint64_t round) { return header(other, round); };
  memory.staging = [this](int other, std::uint64_t round) { return staging(other, round); };
  memory.on_arrival = [this](int other, std::uint64_t round) { publish_arrival(other, round); };
  memory.gossip.has_reached = [this](int other, std::uint64_t round) { return has_reached(other, round); };
  memory.gossip.on_reached = [this](int other, std::uint64_t round) { publish_remote_arrival(other, round); };
  memory.staging_bytes = staging_bytes();
  return std::make_unique<HostMirror>(*network_, routes, std::move(memory));
}

void ClusterTransport::open_messages() {
  MailboxMemory memory;
  memory.header = [this](int source, int destination, std::uint64_t chunk) {
    return mailbox_header(source, destination, chunk);
  };
  memory.payload = [this](int source, int destination, std::uint64_t chunk) {
    return mailbox_payload(source, destination, chunk);
  };
  memory.on_written = [this](int source, std::uint64_t chunk) {
    mailbox(source, rank()).written.store(chunk, std::memory_order_release);
  };
  memory.on_read = [this](int destination, std::uint64_t chunk) {
    mailbox(rank(), destination).read.store(chunk, std::memory_order_release);
  };
  memory.chunk_bytes = mailbox_chunk_bytes();
  messages_ = std::make_unique<RemoteMessages>(*network_, rank(), remote_, std::move(memory));
}

std::unique_ptr<ClusterHierarchy> ClusterTransport::make_hierarchy(const WaitOptions& waiting) {
  constexpr std::uint64_t kTag = ~std::uint64_t{0};  // of no subgroup of the user
  std::vector<int> here;
  for (int each = 0; each < size(); ++each)
    if (!is_remote(each)) here.push_back(each);
  SharedTransportOptions shared = options();
  shared.staging_bytes = hierarchy_staging_bytes(shared.staging_bytes);
  auto host = std::make_shared<SharedTransport>(host_group(), group_members(here), subgroup_tag(kTag), shared,
                                                waiting);
  network_->keep(host->memory());
  const auto watched = [this](const WaitOptions& limits,
                              const std::function<WaitResult(const WaitOptions&)>& wait) {
    return wait_on_network(limits, wait);
  };
  return std::make_unique<ClusterHierarchy>(std::move(host), std::move(here), *network_, watched);
}

std::shared_ptr<Transport> ClusterTransport::subgroup(std::span<const int> chosen, std::uint64_t tag,
                                                      const WaitOptions& waiting) {
  std::vector<int> members;
  for (const int member : chosen) members.push_back(world_[static_cast<std::size_t>(member)]);
  const bool local =
      std::none_of(chosen.begin(), chosen.end(), [this](int member) { return is_remote(member); });
  if (local) return SharedTransport::subgroup(chosen, tag, waiting);
  std::shared_ptr<Transport> opened;
  while_watched(waiting, [&](const WaitOptions& watched) {
    opened = std::make_shared<ClusterTransport>(context_, std::move(members), subgroup_tag(tag),
                                                /*in_store=*/false, options(), watched);
  });
  return opened;
}

void ClusterTransport::connect_subgroup(Transport& subgroup, const WaitOptions& waiting) {
  if (auto* group = dynamic_cast<ClusterTransport*>(&subgroup))  // or all of its ranks are on this host
    while_watched(waiting, [&](const WaitOptions& watched) { group->connect(watched); });
}

// The new group's network takes a rank that cannot be reached for one that may still come.
void ClusterTransport::while_watched(const WaitOptions& waiting,
                                     const std::function<void(const WaitOptions&)>& step) {
  const std::function<void()> check = [&] {
    waiting.check_interrupt();
    if (aborted(nullptr)) throw WaitEnded{{WaitResult::Outcome::kAborted}};
    if (const WaitResult ended = find_ended(); !ended.ok()) throw WaitEnded{ended};
  };
  const WaitOptions watched = waiting.with_interrupt(check);
  try {
    step(watched);
  } catch (const Error& error) {
    // The rank may have left because of an error of this group, which may still arrive.
    for (int times = 0; error.kind() == ErrorKind::kPeerLost && times < kCauseChecks; ++times) {
      check();
      std::this_thread::sleep_for(kBetweenCauseChecks);
    }
    throw;
  }
}

void ClusterTransport::learn_addresses(std::span<const std::string> by_rank) {
  for (const int other : remote_) network_->learn(other, by_rank[static_cast<std::size_t>(other)]);
}

}  // namespace multiring
