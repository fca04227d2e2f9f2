#include "transport/cluster/cluster_hierarchy.h"

namespace multiring {

WaitResult ClusterHierarchy::meet(const Waiting& waiting) {
  ++round_;
  host_->arrive(round_, 0);
  WaitResult result = watch_(waiting, [this](const Waiting& watched) {
    // A rank of this host may wait for a message that waits here to be sent on.
    const std::function<void()> look = [&] {
      network_->progress();
      watched.check_interrupt();
    };
    Waiting driving = watched;
    driving.interrupt = &look;
    return host_->await_all(round_, driving);
  });
  if (result.outcome == WaitResult::Outcome::kTimeout)
    for (std::size_t place = host_ranks_.size(); place-- > 0;)
      if (host_->arrived(static_cast<int>(place)) < round_) result.peer = host_ranks_[place];
  if (result.outcome == WaitResult::Outcome::kPeerLost && result.peer >= 0)
    result.peer = host_ranks_[static_cast<std::size_t>(result.peer)];
  return result;
}

WaitResult ClusterHierarchy::connect(std::span<const int> peers, const Waiting& waiting) {
  std::vector<Network::Link> links;
  for (const int peer : peers) links.push_back({peer, 0});
  return watch_(waiting, [&](const Waiting& watched) {
    try {
      network_->connect(links, watched);
    } catch (const Error& error) {
      // In the middle of an operation a peer is lost as in any other wait.
      if (error.kind() != ErrorKind::kPeerLost || error.context().peer < 0) throw;
      return WaitResult{WaitResult::Outcome::kPeerLost, error.context().peer};
    }
    return WaitResult{};
  });
}

WaitResult ClusterHierarchy::wait(std::span<const Ticket> tickets, const Waiting& waiting) {
  return watch_(waiting, [&](const Waiting& watched) { return network_->wait(tickets, watched); });
}

void ClusterHierarchy::leave() {
  network_->leave();
  host_->leave();
}

void ClusterHierarchy::abandon() {
  network_->abandon();
  host_->abandon();
}

void ClusterHierarchy::wake() {
  network_->wake();
  host_->wake();
}

}  // namespace multiring
