#include "transport/cluster/cluster_hierarchy.h"

namespace multiring {

WaitResult ClusterHierarchy::synchronise(const WaitOptions& waiting) {
  ++round_;
  host_->arrive(round_, 0);
  WaitResult result = run_wait_(waiting, [this](const WaitOptions& inner) {
    // A rank of this host may wait for a message that waits here to be forwarded.
    const std::function<void()> make_progress = [&] {
      network_.progress();
      inner.check_interrupt();
    };
    WaitOptions driving = inner;
    driving.interrupt = &make_progress;
    return host_->await_all(round_, driving);
  });
  if (result.outcome == WaitResult::Outcome::kTimeout)
    for (std::size_t local = host_ranks_.size(); local-- > 0;)
      if (host_->arrived(static_cast<int>(local)) < round_) result.peer = host_ranks_[local];
  if (result.outcome == WaitResult::Outcome::kPeerLost && result.peer >= 0)
    result.peer = host_ranks_[static_cast<std::size_t>(result.peer)];
  return result;
}

WaitResult ClusterHierarchy::connect(std::span<const int> peers, const WaitOptions& waiting) {
  std::vector<Network::Link> links;
  for (const int peer : peers) links.push_back({peer, kPlans});
  return run_wait_(waiting, [&](const WaitOptions& inner) {
    try {
      network_.connect(links, inner);
    } catch (const Error& error) {
      // A lost peer ends the operation like any other wait.
      if (error.kind() != ErrorKind::kPeerLost || error.context().peer < 0) throw;
      const int peer = error.context().peer;
      return WaitResult{WaitResult::Outcome::kPeerLost, peer, network_.ended(peer).peer_left};
    }
    return WaitResult{};
  });
}

WaitResult ClusterHierarchy::wait(std::span<const Ticket> tickets, const WaitOptions& waiting) {
  return run_wait_(waiting, [&](const WaitOptions& inner) { return network_.wait(tickets, inner); });
}

}  // namespace multiring
