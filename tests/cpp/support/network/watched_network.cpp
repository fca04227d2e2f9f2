#include "support/network/watched_network.h"

#include <string>
#include <thread>
#include <utility>

#include "transport/cluster/channels.h"

namespace multiring::testing {
namespace {

class WatchedNetwork final : public Network {
 public:
  WatchedNetwork(std::unique_ptr<Network> network, WatchedNetworks& watch,
                 std::function<bool(int)> may_connect)
      : network_(std::move(network)), watch_(watch), may_connect_(std::move(may_connect)) {}

  Ticket post_send(int peer, int channel, std::span<const std::span<const std::byte>> parts) override {
    std::size_t bytes = 0;
    for (const auto& part : parts) bytes += part.size();
    watch_.count(peer, channel, bytes);
    return network_->post_send(peer, channel, parts);
  }

  int rank() const override { return network_->rank(); }
  int size() const override { return network_->size(); }
  int channels() const override { return network_->channels(); }
  std::string host(int rank) override { return network_->host(rank); }
  std::string address() const override { return network_->address(); }
  void learn(int rank, const std::string& address) override { network_->learn(rank, address); }
  void connect(std::span<const Link> links, const WaitOptions& waiting) override {
    check(links);
    network_->connect(links, waiting);
  }
  bool links_on_demand() const override { return network_->links_on_demand(); }
  WaitResult connect_on_demand(std::span<const Link> links, const WaitOptions& waiting) override {
    check(links);
    return network_->connect_on_demand(links, waiting);
  }
  bool linked(const Link& link) const override { return network_->linked(link); }
  std::uint64_t links_version() const override { return network_->links_version(); }
  Ticket post_receive(int peer, int channel, std::span<std::byte> buffer) override {
    return network_->post_receive(peer, channel, buffer);
  }
  WaitResult wait(std::span<const Ticket> tickets, const WaitOptions& waiting) override {
    return watch_.withholding ? wait_for_an_abort(waiting) : network_->wait(tickets, waiting);
  }
  WaitResult wait_any(std::span<const Ticket> tickets, const WaitOptions& waiting) override {
    return watch_.withholding ? wait_for_an_abort(waiting) : network_->wait_any(tickets, waiting);
  }
  bool done(Ticket ticket) const override { return !watch_.withholding && network_->done(ticket); }
  void give_up(std::span<const Ticket> tickets) override { network_->give_up(tickets); }
  void progress() override {
    throw_if_failing();
    network_->progress();
  }
  bool is_ahead(int rank, int channel) const override { return network_->is_ahead(rank, channel); }
  WaitResult ended(int rank) const override { return network_->ended(rank); }
  void keep(std::shared_ptr<const void> memory) override { network_->keep(std::move(memory)); }
  void abort(const Error& error) override {
    throw_if_failing();
    network_->abort(error);
  }
  void relay(const AbortRecord& record) override { network_->relay(record); }
  bool aborted(AbortRecord* record) const override { return network_->aborted(record); }
  void leave() override { network_->leave(); }
  void abandon() override { network_->abandon(); }
  void wake() override { network_->wake(); }

 private:
  void check(std::span<const Link> links) const {
    for (const Link& link : links)
      if (may_connect_ && !may_connect_(link.peer))
        throw Error(ErrorKind::kInternal, "rank " + std::to_string(rank()) + " connects with rank " +
                                              std::to_string(link.peer) + ", to whose host it has no link");
  }
  WaitResult wait_for_an_abort(const WaitOptions& waiting) {
    waiting.deadline.start();
    for (;;) {
      network_->progress();
      if (network_->aborted(nullptr)) return {WaitResult::Outcome::kAborted};
      waiting.check_interrupt();
      if (waiting.is_cancelled()) return {WaitResult::Outcome::kCancelled};
      if (waiting.deadline.expired()) return {WaitResult::Outcome::kTimeout};
      std::this_thread::yield();
    }
  }
  void throw_if_failing() const {
    if (watch_.failing) throw Error(ErrorKind::kInternal, "the network fails, as the test has it");
  }

  std::unique_ptr<Network> network_;
  WatchedNetworks& watch_;
  const std::function<bool(int)> may_connect_;
};

}  // namespace

void WatchedNetworks::count(int peer, int channel, std::size_t bytes) {
  if (channel == kRounds) rounds.count(bytes);
  if (channel == kPlans) plans.count(bytes), plan_peers.count(peer);
  if (channel == kChunks || channel == kAcks) messages.count(bytes);
}

std::unique_ptr<Network> watched(std::unique_ptr<Network> network, WatchedNetworks& watch,
                                 std::function<bool(int)> may_connect) {
  return std::make_unique<WatchedNetwork>(std::move(network), watch, std::move(may_connect));
}

}  // namespace multiring::testing
