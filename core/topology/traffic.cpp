#include "topology/traffic.h"

#include <algorithm>

namespace multiring {

Traffic::Traffic(const Plan& plan)
    : plan_(plan),
      host_of_(plan.cluster().host_of_rank()),
      ranks_(host_of_.size()),
      adding_(host_of_.size()) {
  for (int host = 0; host < plan.cluster().host_count(); ++host) {
    first_link_.push_back(links_.size());
    const std::size_t interfaces = plan.cluster().hosts[static_cast<std::size_t>(host)].interfaces.size();
    for (std::size_t interface = 0; interface < interfaces; ++interface)
      links_.push_back({host, static_cast<int>(interface), -1, 0, 0, 0});
  }
}

void Traffic::clear() {
  for (LinkTraffic& link : links_) link.sent = link.received = link.messages = 0;
  cables_.clear();
  std::ranges::fill(ranks_, RankTraffic{});
  std::ranges::fill(adding_, Range{});
}

std::size_t Traffic::link_of(int host, int channel) const {
  const auto number = static_cast<std::size_t>(host);
  const auto interface =
      static_cast<std::size_t>(plan_.channels()[static_cast<std::size_t>(channel)].interface);
  return first_link_[number] + interface % plan_.cluster().hosts[number].interfaces.size();
}

void Traffic::add(const Step& step, const Transfer& transfer) {
  RankTraffic& sender = ranks_[static_cast<std::size_t>(transfer.from)];
  if (step.across_hosts()) {
    const std::size_t index = link_of(host_of(transfer.from), transfer.channel);
    LinkTraffic& link = links_[index];
    link.sent += transfer.bytes;
    ++link.messages;
    links_[link_of(host_of(transfer.to), transfer.channel)].received += transfer.bytes;
    if (!plan_.cluster().fully_linked()) {
      LinkTraffic& cable = cables_[{host_of(transfer.from), host_of(transfer.to), index}];
      cable.host = link.host;
      cable.interface = link.interface;
      cable.neighbour = host_of(transfer.to);
      cable.sent += transfer.bytes;
      ++cable.messages;
    }
    sender.sent += transfer.bytes;
    sender.touched += transfer.bytes;
    ++sender.messages;
  } else {
    sender.sent_in_memory += transfer.bytes;
  }
  add_touched(transfer);
}

void Traffic::add_touched(const Transfer& transfer) {
  RankTraffic& receiver = ranks_[static_cast<std::size_t>(transfer.to)];
  receiver.touched += transfer.bytes;
  if (transfer.kind == TransferKind::kResult) {
    // On one host who adds writes the sum to all right away; otherwise it is read and written again.
    if (transfer.channel < 0 && plan_.cluster().host_count() > 1) receiver.touched += transfer.bytes;
    return;
  }
  // However many contributions are added at once, the own one is read and the sum written only once.
  Range& adding = adding_[static_cast<std::size_t>(transfer.to)];
  if (adding == transfer.range) return;
  adding = transfer.range;
  receiver.touched += 2 * transfer.range.size() * plan_.element_bytes();
}

namespace {

void add_step(Traffic& traffic, const Plan& plan, const Step& step) {
  for (int hop = 0; hop < hop_count(step); ++hop)
    for_each_transfer(plan, step, hop, [&](const Transfer& transfer) { traffic.add(step, transfer); });
}

}  // namespace

Traffic step_traffic(const Plan& plan, const Step& step) {
  Traffic traffic(plan);
  add_step(traffic, plan, step);
  return traffic;
}

Traffic total_traffic(const Plan& plan) {
  Traffic traffic(plan);
  for (const Step& step : plan.steps()) add_step(traffic, plan, step);
  return traffic;
}

}  // namespace multiring
