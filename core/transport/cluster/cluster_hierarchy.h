#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/cluster/channels.h"
#include "transport/hierarchy.h"
#include "transport/network.h"
#include "transport/transport.h"

namespace multiring {

/// The hierarchy of a ClusterTransport.
class ClusterHierarchy final : public Hierarchy {
 public:
  /// Runs a wait that also ends with whatever ends the waits of the whole group.
  using RunWait = std::function<WaitResult(const WaitOptions& waiting,
                                           const std::function<WaitResult(const WaitOptions&)>& wait)>;

  /// `host`: among the ranks of this host, in the order of `host_ranks`. `network`: among all; has to outlive
  /// it.
  ClusterHierarchy(std::shared_ptr<Transport> host, std::vector<int> host_ranks, Network& network,
                   RunWait run_wait)
      : host_(std::move(host)),
        host_ranks_(std::move(host_ranks)),
        network_(network),
        run_wait_(std::move(run_wait)) {}

  std::span<const int> host_ranks() const override { return host_ranks_; }
  std::byte* staging(int local) const override { return host_->staging(local, round_ + 1); }
  std::size_t staging_bytes() const override { return host_->staging_bytes(); }
  WaitResult synchronise(const WaitOptions& waiting) override;
  const std::byte* staged(int local) const override { return host_->staging(local, round_); }

  WaitResult connect(std::span<const int> peers, const WaitOptions& waiting) override;
  Ticket post_send(int peer, std::span<const std::span<const std::byte>> parts) override {
    return network_.post_send(peer, kPlans, parts);
  }
  Ticket post_receive(int peer, std::span<std::byte> buffer) override {
    return network_.post_receive(peer, kPlans, buffer);
  }
  WaitResult wait(std::span<const Ticket> tickets, const WaitOptions& waiting) override;
  bool done(Ticket ticket) const override { return network_.done(ticket); }
  void give_up(std::span<const Ticket> tickets) override { network_.give_up(tickets); }
  bool outlasts_give_up() const override { return network_.outlasts_give_up(); }
  void keep(std::shared_ptr<const void> memory) override { network_.keep(std::move(memory)); }

  // As those of Transport, from any thread.
  void leave() { host_->leave(); }
  void abandon() { host_->abandon(); }
  void wake() { host_->wake(); }

 private:
  std::shared_ptr<Transport> host_;
  std::vector<int> host_ranks_;
  Network& network_;
  RunWait run_wait_;
  std::uint64_t round_ = 0;
};

}  // namespace multiring
