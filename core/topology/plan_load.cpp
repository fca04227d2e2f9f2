#include "topology/plan_load.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "topology/traffic.h"

namespace multiring {
namespace {

double speed_of(const Host& host) {
  double speed = 0.0;
  for (const Interface& interface : host.interfaces) speed += interface.bytes_per_second;
  return speed;
}

/// Adds up the hops of one step.
class StepCounter {
 public:
  explicit StepCounter(const Plan& plan) : plan_(plan), traffic_(plan) {}

  StepLoad count(const Step& step) {
    StepLoad load;
    load.dimension = step.dimension;
    load.hops = hop_count(step);
    for (int hop = 0; hop < load.hops; ++hop) {
      traffic_.clear();
      HostBytes received;
      for_each_transfer(plan_, step, hop, [&](const Transfer& transfer) {
        traffic_.add(step, transfer);
        received[traffic_.host_of(transfer.to)][traffic_.host_of(transfer.from)] +=
            static_cast<double>(transfer.bytes);
      });
      add_memory(load);
      if (!step.across_hosts()) continue;
      add_messages(load);
      if (plan_.cluster().fully_linked())
        load.queued_bytes = std::max(load.queued_bytes, queued_bytes(received));
    }
    return load;
  }

 private:
  void add_memory(StepLoad& load) const {
    std::vector<double> of_host(plan_.cluster().hosts.size(), 0.0);
    double most = 0.0;
    for (std::size_t rank = 0; rank < traffic_.ranks().size(); ++rank) {
      const auto touched = static_cast<double>(traffic_.ranks()[rank].touched);
      of_host[static_cast<std::size_t>(traffic_.host_of(static_cast<int>(rank)))] += touched;
      most = std::max(most, touched);
    }
    load.rank_memory += most;
    load.host_memory += *std::ranges::max_element(of_host);
  }

  void add_messages(StepLoad& load) {
    double most_bytes = 0.0;
    std::size_t most_messages = 0;
    for_each_link([&](const LinkTraffic& link) {
      if (link.sent == 0 && link.received == 0) return;
      const Host& host = plan_.cluster().hosts[static_cast<std::size_t>(link.host)];
      const double share = speed_of(plan_.cluster().hosts.front()) /
                           host.interfaces[static_cast<std::size_t>(link.interface)].bytes_per_second;
      const LinkLoad bytes{static_cast<double>(link.sent) * share,
                           static_cast<double>(link.received) * share};
      most_bytes = std::max({most_bytes, bytes.sent, bytes.received});
      most_messages = std::max(most_messages, link.messages);
      const auto number = numbers_.try_emplace({link.host, link.neighbour, link.interface}, numbers_.size());
      const std::size_t index = number.first->second;
      if (index >= load.links.size()) load.links.resize(index + 1);
      load.links[index].sent += bytes.sent;
      load.links[index].received += bytes.received;
    });
    std::size_t of_rank = 0;
    for (const RankTraffic& rank : traffic_.ranks()) {
      of_rank = std::max(of_rank, rank.messages);
      load.all_messages += static_cast<double>(rank.messages);
      load.all_bytes += static_cast<double>(rank.sent);
    }
    load.link_bytes += most_bytes;
    load.link_messages += static_cast<double>(most_messages);
    load.rank_messages += static_cast<double>(of_rank);
  }

  template <class Visit>
  void for_each_link(const Visit& visit) {
    if (plan_.cluster().fully_linked()) {
      for (const LinkTraffic& link : traffic_.links()) visit(link);
    } else {
      for (const auto& [ends, cable] : traffic_.cables()) visit(cable);
    }
  }

  const Plan& plan_;
  Traffic traffic_;
  std::map<std::tuple<int, int, int>, std::size_t> numbers_;  // of links, by host, neighbour and interface
};

}  // namespace

double queued_bytes(const HostBytes& received) {
  double most = 0.0;
  for (const auto& [host, senders] : received) {
    double all = 0.0;
    double largest = 0.0;
    for (const auto& [sender, bytes] : senders) {
      all += bytes;
      largest = std::max(largest, bytes);
    }
    most = std::max(most, all - largest);
  }
  return most;
}

PlanLoad load_of(const Plan& plan) {
  StepCounter counter(plan);
  PlanLoad load;
  for (const Step& step : plan.steps()) load.push_back(counter.count(step));
  return load;
}

}  // namespace multiring
