#include "collective/plan/round_load.h"

#include <algorithm>

#include "topology/plan_load.h"
#include "transport/cluster/mirror_routes.h"

namespace multiring {

RoundLoad::RoundLoad(const Cluster& cluster, int publisher)
    : publishers_(publisher < 0 ? static_cast<std::size_t>(cluster.size()) : 1) {
  const std::vector<int> hosts = cluster.host_of_rank();
  const bool by_switch = cluster.fully_linked();
  std::vector<HostBytes> received;  // parts, by step and host
  for (int rank = 0; rank < cluster.size(); ++rank) {
    const MirrorRoutes routes = by_switch ? mirror_routes(hosts, rank)
                                          : neighbour_routes(hosts, rank, cluster.links == HostLinks::kRing);
    steps_.resize(routes.steps.size());
    received.resize(routes.steps.size(), HostBytes(cluster.hosts.size()));
    std::size_t parts = 0;
    for (std::size_t step = 0; step < routes.steps.size(); ++step) {
      std::map<Link, std::size_t> messages;  // of this rank
      for (const MirrorMessage& message : routes.steps[step].out) {
        const Link link{static_cast<std::size_t>(hosts[static_cast<std::size_t>(rank)]),
                        by_switch ? -1 : hosts[static_cast<std::size_t>(message.peer)]};
        Sent& sent = steps_[step][link];
        const auto published = publisher < 0
                                   ? message.ranks.size()
                                   : static_cast<std::size_t>(std::ranges::count(message.ranks, publisher));
        sent.parts += published;
        sent.most_parts = std::max(sent.most_parts, published);
        ++sent.messages;
        sent.most_messages = std::max(sent.most_messages, ++messages[link]);
        parts += published;
        received[step][static_cast<std::size_t>(hosts[static_cast<std::size_t>(message.peer)])] +=
            static_cast<double>(published);
      }
    }
    rank_parts_ = std::max(rank_parts_, parts);
  }
  std::map<Link, std::size_t> all;
  for (const auto& step : steps_)
    for (const auto& [link, sent] : step) link_parts_ = std::max(link_parts_, all[link] += sent.parts);
  for (const HostBytes& step : received) queued_parts_.push_back(by_switch ? std::ranges::max(step) : 0.0);
}

std::size_t RoundLoad::Sent::messages_each(std::size_t bytes) const {
  // Headers and what is staged leave together, if it is little.
  const bool is_combined = most_parts * bytes <= MirrorRoutes::kMaxCombined;
  return is_combined ? 1 : 1 + most_parts;
}

double RoundLoad::Sent::seconds(std::size_t bytes, double beyond_burst, double bytes_per_second,
                                const CostModel& model) const {
  const auto each = static_cast<double>(messages_each(bytes));
  const double sent = static_cast<double>(parts) * static_cast<double>(bytes);
  return std::max({beyond_burst * sent / bytes_per_second,
                   static_cast<double>(most_messages) * each * model.message_seconds,
                   static_cast<double>(messages) * each * model.interface_message_seconds});
}

double RoundLoad::seconds(std::size_t bytes, std::size_t taken, std::size_t rounds, const Cluster& cluster,
                          const CostModel& model) const {
  double seconds = 0.0;
  for (const Host& host : cluster.hosts)  // when ranks have published, and when all has arrived
    if (host.ranks.size() > 1) seconds = std::max(seconds, 2 * host.memory.latency);
  for (const double queued : queued_parts_)
    seconds += model.held_up({queued * static_cast<double>(bytes), 1.0});
  const double beyond_burst = model.beyond_burst(static_cast<double>(link_parts_) *
                                                 static_cast<double>(bytes) * static_cast<double>(rounds));
  for (const auto& step : steps_) {
    double sending = 0.0;
    double all_messages = 0.0;
    double all_bytes = 0.0;
    for (const auto& [link, sent] : step) {
      sending = std::max(sending, sent.seconds(bytes, beyond_burst,
                                               crossing_speed(cluster.hosts[link.first], model), model));
      all_messages += static_cast<double>(sent.messages * sent.messages_each(bytes));
      all_bytes += static_cast<double>(sent.parts) * static_cast<double>(bytes);
    }
    seconds += crossing_latency(cluster, model) + all_messages * model.shared_message_seconds + sending +
               all_bytes / model.shared_bytes_per_second;
  }
  const double read =
      static_cast<double>(bytes) + static_cast<double>(taken) * static_cast<double>(publishers_);
  double memory = read / model.reduction_bytes_per_second;
  for (const Host& host : cluster.hosts)
    memory = std::max(memory, read * static_cast<double>(host.ranks.size()) / host.memory.bytes_per_second);
  return seconds + memory;
}

}  // namespace multiring
