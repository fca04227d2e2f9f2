#include "topology/cost_model.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "topology/traffic.h"

namespace multiring {
namespace {

bool positive(double value) { return std::isfinite(value) && value > 0.0; }

bool not_negative(double value) { return std::isfinite(value) && value >= 0.0; }

void validate(const CostModel& model) {
  bool valid = not_negative(model.message_seconds) && not_negative(model.interface_message_seconds) &&
               positive(model.reduction_bytes_per_second);
  for (const LinkCost& link : model.dimensions)
    valid = valid && not_negative(link.latency) && positive(link.bytes_per_second);
  if (!valid) throw_usage("a cost model needs speeds above 0 and times of 0 or more");
}

/// The measured link of a dimension, if it has one of its own.
const LinkCost* own_link(const CostModel& model, int dimension) {
  const auto index = static_cast<std::size_t>(dimension) - 1;
  return index < model.dimensions.size() ? &model.dimensions[index] : nullptr;
}

/// Adds up the costs of the hops of one step.
class StepPredictor {
 public:
  StepPredictor(const Plan& plan, const CostModel& model) : plan_(plan), model_(model), traffic_(plan) {}

  double busiest_link() const {
    double most = 0.0;
    for (const auto& [link, seconds] : busy_) most = std::max({most, seconds.first, seconds.second});
    return most;
  }

  StepCost predict(const Step& step) {
    StepCost cost;
    cost.hops = hop_count(step);
    for (int hop = 0; hop < cost.hops; ++hop) {
      traffic_.clear();
      for_each_transfer(plan_, step, hop, [&](const Transfer& transfer) { traffic_.add(step, transfer); });
      add_memory(cost);
      if (step.across_hosts()) {
        add_network(cost, step);
      } else {
        cost.synchronisation += memory_latency();
      }
    }
    return cost;
  }

 private:
  double memory_latency() const {
    double most = 0.0;
    for (const Host& host : plan_.cluster().hosts) most = std::max(most, host.memory.latency);
    return most;
  }

  void add_memory(StepCost& cost) const {
    std::vector<double> of_host(plan_.cluster().hosts.size(), 0.0);
    double most = 0.0;
    for (std::size_t rank = 0; rank < traffic_.ranks().size(); ++rank) {
      const auto touched = static_cast<double>(traffic_.ranks()[rank].touched);
      of_host[static_cast<std::size_t>(traffic_.host_of(static_cast<int>(rank)))] += touched;
      most = std::max(most, touched / model_.reduction_bytes_per_second);
    }
    for (std::size_t host = 0; host < of_host.size(); ++host)
      most = std::max(most, of_host[host] / plan_.cluster().hosts[host].memory.bytes_per_second);
    cost.memory += most;
  }

  void add_network(StepCost& cost, const Step& step) {
    const LinkCost* own = own_link(model_, step.dimension);
    double wire = 0.0;
    std::size_t messages_of_link = 0;
    double latency = own != nullptr ? own->latency : 0.0;
    const std::vector<LinkTraffic> links =
        plan_.cluster().fully_linked() ? traffic_.links() : traffic_.cables();
    for (const LinkTraffic& link : links) {
      const std::size_t bytes = std::max(link.sent, link.received);
      if (bytes == 0) continue;
      const Interface& interface = plan_.cluster()
                                       .hosts[static_cast<std::size_t>(link.host)]
                                       .interfaces[static_cast<std::size_t>(link.interface)];
      if (own == nullptr) latency = std::max(latency, interface.latency);
      messages_of_link = std::max(messages_of_link, link.messages);
      const double speed = link_speed(interface, link, own);
      wire = std::max(wire, static_cast<double>(bytes) / speed);
      auto& [sending, receiving] = busy_[{link.host, link.neighbour, link.interface}];
      sending += static_cast<double>(link.sent) / speed;
      receiving += static_cast<double>(link.received) / speed;
    }
    std::size_t messages = 0;
    for (const RankTraffic& rank : traffic_.ranks()) messages = std::max(messages, rank.messages);
    cost.latency += latency;
    cost.wire += wire;
    cost.interface_messages += static_cast<double>(messages_of_link) * model_.interface_message_seconds;
    cost.messages += static_cast<double>(messages) * model_.message_seconds;
  }

  /// The speed of a link, if the dimension has its own in the proportion of the interfaces of the host.
  double link_speed(const Interface& interface, const LinkTraffic& link, const LinkCost* own) const {
    if (own == nullptr) return interface.bytes_per_second;
    double all = 0.0;
    for (const Interface& other : plan_.cluster().hosts[static_cast<std::size_t>(link.host)].interfaces)
      all += other.bytes_per_second;
    return own->bytes_per_second * interface.bytes_per_second / all;
  }

  const Plan& plan_;
  const CostModel& model_;
  Traffic traffic_;
  std::map<std::tuple<int, int, int>, std::pair<double, double>>
      busy_;  // seconds of links, sending, receiving
};

}  // namespace

double PlanCost::seconds(std::size_t segments) const {
  const auto pieces = static_cast<double>(segments);
  double first = 0.0;
  double network = 0.0;
  double messages = 0.0;
  double memory = 0.0;
  for (const StepCost& step : steps) {
    network += std::max({step.wire / pieces, step.messages, step.interface_messages});
    messages += std::max(step.messages, step.interface_messages);
    memory += step.synchronisation + step.memory / pieces;
    first += step.latency + step.interface_messages;  // later ones are hidden behind the wire
  }
  first += network + memory;
  // Pieces are in different hops, which keep different links busy.
  const double each = std::max({busiest_link / pieces, messages, memory});
  return first + (pieces - 1.0) * each;
}

PlanCost predict_steps(const Plan& plan, const CostModel& model) {
  validate(model);
  PlanCost cost;
  StepPredictor predictor(plan, model);
  for (const Step& step : plan.steps()) cost.steps.push_back(predictor.predict(step));
  cost.busiest_link = predictor.busiest_link();
  return cost;
}

double predict(const Plan& plan, const CostModel& model) {
  return predict_steps(plan, model).seconds(plan.segments());
}

double limit_seconds(const Plan& plan, const CostModel& model) {
  validate(model);
  const Cluster& cluster = plan.cluster();
  const auto bytes = static_cast<double>(plan.count() * plan.element_bytes());
  // Of a group of n, each member sends and receives at least so much of what the group reduces.
  const auto share = [](double n) { return 2.0 * (n - 1.0) / n; };
  double limit = 0.0;
  double divided = bytes;      // what a host still has to reduce in the dimension
  double by_interfaces = 0.0;  // what it sends in dimensions without links of their own
  for (int dimension = 1; dimension < static_cast<int>(plan.mode().size()); ++dimension) {
    const auto n = static_cast<double>(plan.mode()[static_cast<std::size_t>(dimension)].size);
    const LinkCost* own = own_link(model, dimension);
    if (own != nullptr)
      limit = std::max(limit, share(n) * divided / own->bytes_per_second);
    else
      by_interfaces += share(n) * divided;
    divided /= n;
  }
  // Of two cables each passes half; along a line each passes everything, in both directions.
  if (!cluster.fully_linked()) by_interfaces = cluster.links == HostLinks::kRing ? by_interfaces / 2 : bytes;
  for (const Host& host : cluster.hosts) {
    if (cluster.size() > 1)
      limit = std::max(limit,
                       2.0 * static_cast<double>(host.ranks.size()) * bytes / host.memory.bytes_per_second);
    double speed = 0.0;
    for (const Interface& interface : host.interfaces) speed += interface.bytes_per_second;
    if (by_interfaces > 0.0) limit = std::max(limit, by_interfaces / speed);
  }
  return limit;
}

LinkCost fit_link(std::span<const Measurement> measurements) {
  // Weighted normal equations of seconds = latency + bytes * slope with weights 1 / seconds^2.
  double w = 0.0, x = 0.0, y = 0.0, xx = 0.0, xy = 0.0;
  double least = INFINITY, most = -INFINITY;
  for (const auto& [bytes, seconds] : measurements) {
    if (!not_negative(bytes) || !positive(seconds))
      throw_usage("a measurement needs bytes of 0 or more in a time above 0");
    const double weight = 1.0 / (seconds * seconds);
    w += weight;
    x += weight * bytes;
    y += weight * seconds;
    xx += weight * bytes * bytes;
    xy += weight * bytes * seconds;
    least = std::min(least, bytes);
    most = std::max(most, bytes);
  }
  if (!(least < most)) throw_usage("a link is fitted to messages of at least two sizes");
  double slope = (w * xy - x * y) / (w * xx - x * x);
  double latency = (y - slope * x) / w;
  if (latency < 0.0) {  // the best line through the origin
    latency = 0.0;
    slope = xy / xx;
  }
  if (!positive(slope)) throw_usage("the measured times do not grow with the size of the message");
  return {latency, 1.0 / slope};
}

}  // namespace multiring
