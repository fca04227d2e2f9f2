// How a ClusterTransport and its subgroups are built.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>

#include "transport/cluster/cluster_transport.h"

namespace multiring {
namespace {

constexpr int kCauseChecks = 20;
constexpr std::chrono::milliseconds kBetweenCauseChecks(10);

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
                                   std::uint64_t tag, const SharedTransportOptions& options,
                                   const WaitOptions& waiting)
    : SharedTransport(context->host_group, group_ranks(*context, members), tag, options, waiting),
      context_(std::move(context)),
      own_tag_(tag),
      world_(std::move(members)) {
  for (int other = 0; other < size(); ++other)
    if (is_remote(other)) remote_.push_back(other);
  connect(waiting);
}

// Networks first: they have receives posted in the memory of the host.
ClusterTransport::~ClusterTransport() {
  ClusterTransport::leave();
  progress_entry_.reset();
  hierarchy_.reset();
  messages_.reset();
  mirror_.reset();
}

std::string ClusterTransport::network_name() const {
  char name[64];
  std::snprintf(name, sizeof name, "%016llx-%d", static_cast<unsigned long long>(own_tag_), world_[0]);
  return name;
}

std::unique_ptr<Network> ClusterTransport::make_network(int channels, const std::string& purpose,
                                                        const WaitOptions& waiting) const {
  auto network = context_->make_network(world_, rank(), channels, network_name() + "-" + purpose, waiting);
  network->keep(memory());
  return network;
}

void ClusterTransport::connect(const WaitOptions& waiting) {
  mirror_ = make_mirror(waiting);
  auto messages = make_network(RemoteMessages::kChannels, "messages", waiting);
  mirror_->network().connect(mirror_->links(), waiting);
  if (!messages->links_on_demand()) {
    std::vector<Network::Link> links;
    for (const int other : remote_)
      for (int channel = 0; channel < RemoteMessages::kChannels; ++channel) links.push_back({other, channel});
    messages->connect(links, waiting);
  }
  messages_ = make_messages(std::move(messages));
  hierarchy_ = make_hierarchy(waiting);
  // Errors of this group must not end the waits of other groups.
  const auto poll = [this] {
    try {
      poll_own();
    } catch (const Error& error) {
      messages_->network().abort(error);
    }
  };
  progress_entry_ = std::make_unique<ProgressRegistry::Entry>(context_->progress, poll);
}

MirrorRoutes ClusterTransport::routes_of(int rank) const {
  std::vector<int> hosts;
  for (int each = 0; each < size(); ++each) hosts.push_back(host_number(each));
  return mirror_routes(hosts, rank, context_->direct_hosts);
}

const std::map<int, MirrorRoutes>& ClusterTransport::host_routes() const {
  if (routes_.empty())
    for (int here = 0; here < size(); ++here)
      if (!is_remote(here)) routes_.emplace(here, routes_of(here));
  return routes_;
}

std::unique_ptr<HostMirror> ClusterTransport::make_mirror(const WaitOptions& waiting) {
  MirrorRoutes routes = routes_of(rank());
  receivers_ = std::move(routes.receivers);
  RoundMemory memory;
  memory.header = [this](int other, std::uint64_t round) { return header(other, round); };
  memory.staging = [this](int other, std::uint64_t round) { return staging(other, round); };
  memory.on_arrival = [this](int other, std::uint64_t round) { publish_arrival(other, round); };
  memory.gossip.has_reached = [this](int other, std::uint64_t round) { return has_reached(other, round); };
  memory.gossip.on_reached = [this](int other, std::uint64_t round) { publish_remote_arrival(other, round); };
  memory.staging_bytes = staging_bytes();
  auto network = make_network(HostMirror::channels(routes), "rounds", waiting);
  return std::make_unique<HostMirror>(std::move(network), routes, std::move(memory));
}

std::unique_ptr<RemoteMessages> ClusterTransport::make_messages(std::unique_ptr<Network> network) {
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
  return std::make_unique<RemoteMessages>(std::move(network), rank(), remote_, std::move(memory));
}

std::unique_ptr<ClusterHierarchy> ClusterTransport::make_hierarchy(const WaitOptions& waiting) {
  constexpr std::uint64_t kTag = ~std::uint64_t{0};  // of no subgroup of the user
  // Messages are sent in pieces of it, which should not be small.
  constexpr std::size_t kStagingFactor = 4;
  constexpr std::size_t kMostStaging = std::size_t{2} << 20;
  std::vector<int> here;
  for (int each = 0; each < size(); ++each)
    if (!is_remote(each)) here.push_back(each);
  SharedTransportOptions shared = options();
  shared.staging_bytes = std::min(shared.staging_bytes * kStagingFactor, kMostStaging);
  auto host = std::make_shared<SharedTransport>(host_group(), group_members(here), subgroup_tag(kTag), shared,
                                                waiting);
  auto network = make_network(1, "plans", waiting);
  network->keep(host->memory());
  const auto watched = [this](const WaitOptions& limits,
                              const std::function<WaitResult(const WaitOptions&)>& wait) {
    return wait_on_network(limits, wait);
  };
  return std::make_unique<ClusterHierarchy>(std::move(host), std::move(here), std::move(network), watched);
}

std::shared_ptr<Transport> ClusterTransport::subgroup(std::span<const int> chosen, std::uint64_t tag,
                                                      const WaitOptions& waiting) {
  std::vector<int> members;
  for (const int member : chosen) members.push_back(world_[static_cast<std::size_t>(member)]);
  const bool local =
      std::none_of(chosen.begin(), chosen.end(), [this](int member) { return is_remote(member); });
  if (local) return SharedTransport::subgroup(chosen, tag, waiting);
  // The new group's networks take a rank that cannot be reached for one that may still come.
  const std::function<void()> check = [&] {
    waiting.check_interrupt();
    if (aborted(nullptr)) throw WaitEnded{{WaitResult::Outcome::kAborted}};
    if (const WaitResult ended = find_ended(); !ended.ok()) throw WaitEnded{ended};
  };
  const WaitOptions watched = waiting.with_interrupt(check);
  try {
    return std::make_shared<ClusterTransport>(context_, std::move(members), subgroup_tag(tag), options(),
                                              watched);
  } catch (const Error& error) {
    // The rank may have left because of an error of this group, which may still arrive.
    for (int times = 0; error.kind() == ErrorKind::kPeerLost && times < kCauseChecks; ++times) {
      check();
      std::this_thread::sleep_for(kBetweenCauseChecks);
    }
    throw;
  }
}

}  // namespace multiring
