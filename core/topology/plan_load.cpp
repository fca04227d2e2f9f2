#include "topology/plan_load.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

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
      HostBytes received(plan_.cluster().hosts.size());
      for_each_transfer(plan_, step, hop, [&](const Transfer& transfer) {
        traffic_.add(step, transfer);
        received[static_cast<std::size_t>(traffic_.host_of(transfer.to))] +=
            static_cast<double>(transfer.bytes);
      });
      add_memory(load);
      if (!step.across_hosts()) continue;
      add_messages(load);
      if (plan_.cluster().fully_linked()) load.received.push_back(std::move(received));
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

QueueLoad queue_of(const PlanLoad& load, std::size_t segments) {
  std::vector<HostBytes> until;  // bytes of the hops before each, and of all
  for (const StepLoad& step : load)
    for (const HostBytes& hop : step.received) {
      if (until.empty()) until.emplace_back(hop.size());
      until.push_back(until.back());
      for (std::size_t host = 0; host < hop.size(); ++host) until.back()[host] += hop[host];
    }
  QueueLoad queue;
  if (until.empty()) return queue;
  const std::size_t hops = until.size() - 1;
  const std::size_t iterations = kPipelineDepth * hops;  // of a piece
  queue.times = std::ceil(static_cast<double>(segments) / static_cast<double>(iterations));
  if (segments > iterations) {  // all hops have as many as they can at once
    queue.bytes = std::ranges::max(until.back()) * kPipelineDepth / static_cast<double>(segments);
    return queue;
  }
  for (std::size_t iteration = 0; iteration < segments + iterations; ++iteration) {
    HostBytes passing(until[0].size());
    for (std::size_t ago = 0; ago < std::min(kPipelineDepth, iteration + 1); ++ago) {
      // Each hop is that much behind the one before it, from the first piece to the last.
      const std::size_t posted = iteration - ago;
      const std::size_t end = std::min(posted / kPipelineDepth + 1, hops);
      const std::size_t ended = posted + 1 - std::min(posted + 1, segments);
      const std::size_t begin = std::min((ended + kPipelineDepth - 1) / kPipelineDepth, end);
      for (std::size_t host = 0; host < passing.size(); ++host)
        passing[host] += until[end][host] - until[begin][host];
    }
    queue.bytes = std::max(queue.bytes, std::ranges::max(passing) / static_cast<double>(segments));
  }
  return queue;
}

PlanLoad load_of(const Plan& plan) {
  StepCounter counter(plan);
  PlanLoad load;
  for (const Step& step : plan.steps()) load.push_back(counter.count(step));
  return load;
}

}  // namespace multiring
