#include "topology/cost_model.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/error.h"

namespace multiring {
namespace {

bool positive(double value) { return std::isfinite(value) && value > 0.0; }

bool not_negative(double value) { return std::isfinite(value) && value >= 0.0; }

void validate(const CostModel& model) {
  bool valid = not_negative(model.call_seconds) && not_negative(model.burst_bytes) &&
               model.queue_bytes >= 0.0 && not_negative(model.loss_seconds) &&
               not_negative(model.message_seconds) && not_negative(model.interface_message_seconds) &&
               not_negative(model.shared_message_seconds) && model.shared_bytes_per_second > 0.0 &&
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

/// The link of a step: its dimension's own, or the interfaces of a host.
LinkCost link_of(const StepLoad& step, const Cluster& cluster, const CostModel& model) {
  if (const LinkCost* const own = own_link(model, step.dimension); own != nullptr) return *own;
  LinkCost link;
  for (const Host& host : cluster.hosts)
    for (const Interface& interface : host.interfaces)
      link.latency = std::max(link.latency, interface.latency);
  for (const Interface& interface : cluster.hosts.front().interfaces)
    link.bytes_per_second += interface.bytes_per_second;
  return link;
}

/// `beyond_burst`: the part of its bytes that takes a link its time.
StepCost price_step(const StepLoad& load, double beyond_burst, const Cluster& cluster,
                    const CostModel& model) {
  StepCost cost;
  cost.hops = load.hops;
  HostMemory memory = cluster.hosts.front().memory;
  for (const Host& host : cluster.hosts) {
    memory.bytes_per_second = std::min(memory.bytes_per_second, host.memory.bytes_per_second);
    memory.latency = std::max(memory.latency, host.memory.latency);
  }
  cost.memory = std::max(load.rank_memory / model.reduction_bytes_per_second,
                         load.host_memory / memory.bytes_per_second);
  if (!load.across_hosts()) {
    cost.synchronisation = load.hops * memory.latency;
    return cost;
  }
  const LinkCost link = link_of(load, cluster, model);
  cost.latency = load.hops * link.latency;
  cost.wire =
      beyond_burst * load.link_bytes / link.bytes_per_second + load.all_bytes / model.shared_bytes_per_second;
  cost.interface_messages = load.link_messages * model.interface_message_seconds;
  cost.messages =
      load.rank_messages * model.message_seconds + load.all_messages * model.shared_message_seconds;
  return cost;
}

/// Of the link that sends or receives the most in all steps, in bytes, or in what `of_byte(step)` makes of
/// one.
template <class OfByte>
double busiest_link(const PlanLoad& load, const OfByte& of_byte) {
  std::vector<LinkLoad> busy;
  for (const StepLoad& step : load) {
    if (!step.across_hosts()) continue;
    busy.resize(std::max(busy.size(), step.links.size()));
    const double each = of_byte(step);
    for (std::size_t link = 0; link < step.links.size(); ++link) {
      busy[link].sent += step.links[link].sent * each;
      busy[link].received += step.links[link].received * each;
    }
  }
  double most = 0.0;
  for (const LinkLoad& link : busy) most = std::max({most, link.sent, link.received});
  return most;
}

}  // namespace

double PlanCost::seconds(std::size_t segments) const {
  const auto pieces = static_cast<double>(segments);
  double first = 0.0;
  double interface = 0.0;
  double processor = 0.0;
  double hop = 0.0;
  for (const StepCost& step : steps) {
    const double memory = step.synchronisation + step.memory / pieces;
    interface += step.interface_messages;
    processor += step.messages + memory;
    if (step.hops > 0) hop = std::max(hop, step.latency / step.hops);
    // Later messages of an interface are hidden behind the wire.
    first += step.latency + step.interface_messages + memory +
             std::max({step.wire / pieces, step.messages, step.interface_messages});
  }
  // Pieces are in different hops, which keep different links busy, some in each. A rank sends and adds with
  // one processor.
  const double each = std::max({busiest_link / pieces, interface, processor, hop / kPipelineDepth});
  return first + (pieces - 1.0) * each;
}

PlanCost price(const PlanLoad& load, const Cluster& cluster, const CostModel& model) {
  validate(model);
  PlanCost cost;
  // Each link lets a burst pass.
  const double beyond_burst =
      model.beyond_burst(busiest_link(load, [](const StepLoad& /*step*/) { return 1.0; }));
  cost.busiest_link = beyond_burst * busiest_link(load, [&](const StepLoad& step) {
                        return 1.0 / link_of(step, cluster, model).bytes_per_second;
                      });
  for (const StepLoad& step : load) {
    cost.steps.push_back(price_step(step, beyond_burst, cluster, model));
    cost.busiest_link += step.all_bytes / model.shared_bytes_per_second;  // all hosts share one
  }
  return cost;
}

PlanCost predict_steps(const Plan& plan, const CostModel& model) {
  return price(load_of(plan), plan.cluster(), model);
}

double crossing_latency(const Cluster& cluster, const CostModel& model) {
  double latency = 0.0;
  for (const LinkCost& link : model.dimensions) latency = std::max(latency, link.latency);
  if (!model.dimensions.empty()) return latency;
  for (const Interface& interface : cluster.hosts[0].interfaces)
    latency = std::max(latency, interface.latency);
  return latency;
}

double crossing_speed(const Host& host, const CostModel& model) {
  if (!model.dimensions.empty())
    return std::ranges::min(model.dimensions, {}, &LinkCost::bytes_per_second).bytes_per_second;
  double speed = 0.0;
  for (const Interface& interface : host.interfaces) speed += interface.bytes_per_second;
  return speed;
}

namespace {

/// What all ranks of a host at least read and write together, where the array has so many bytes.
double least_memory_bytes(const Plan& plan, std::size_t ranks, double bytes) {
  const auto here = static_cast<double>(ranks);
  const auto all = static_cast<double>(plan.cluster().size());
  switch (plan.collective()) {
    case Collective::kReduceScatter:
      return here * bytes;  // inputs
    case Collective::kAllgather:
      return here * bytes * (all - 1.0) / all;  // the others' pieces
    case Collective::kBroadcast:
      return (here - 1.0) * bytes;  // the root may be here
    case Collective::kAllreduce:
    case Collective::kGather:  // and the others without a plan
    case Collective::kScatter:
    case Collective::kAlltoall:
      break;
  }
  return 2.0 * here * bytes;
}

}  // namespace

double limit_seconds(const Plan& plan, const CostModel& model) {
  validate(model);
  const Cluster& cluster = plan.cluster();
  const auto bytes = static_cast<double>(plan.count() * plan.element_bytes());
  const bool is_half = plan.collective() != Collective::kAllreduce;
  // Of a group of n, each member sends and receives at least so much of what the group reduces.
  const auto share = [&](double n) { return (is_half ? 1.0 : 2.0) * (n - 1.0) / n; };
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
  if (plan.collective() == Collective::kBroadcast && by_interfaces > 0.0) by_interfaces = bytes;
  // Of two cables each passes half; along a line each passes everything, in both directions, and of blocks
  // all but one.
  if (!cluster.fully_linked() && cluster.links == HostLinks::kRing)
    by_interfaces /= 2;
  else if (!cluster.fully_linked() && !is_half)
    by_interfaces = bytes;
  for (const Host& host : cluster.hosts) {
    if (cluster.size() > 1)
      limit =
          std::max(limit, least_memory_bytes(plan, host.ranks.size(), bytes) / host.memory.bytes_per_second);
    double speed = 0.0;
    for (const Interface& interface : host.interfaces) speed += interface.bytes_per_second;
    if (by_interfaces > 0.0) limit = std::max(limit, by_interfaces / speed);
  }
  return limit;
}

}  // namespace multiring
