#include "transport/cluster/mirror_routes.h"

#include <algorithm>
#include <cstddef>
#include <map>

namespace multiring {
namespace {

/// The hosts of a group in a circle, and the receivers on them.
class Circle {
 public:
  explicit Circle(std::span<const int> hosts) : position_(hosts.size()), local_(hosts.size()) {
    std::map<int, std::size_t> numbers;
    for (const int host : hosts) numbers.emplace(host, 0);
    for (auto& [host, position] : numbers) {
      position = hosts_.size();
      hosts_.emplace_back();
    }
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      auto& host = hosts_[position_[rank] = numbers[hosts[rank]]];
      local_[rank] = host.size();
      host.push_back(static_cast<int>(rank));
    }
  }

  std::size_t size() const { return hosts_.size(); }
  std::size_t position(int rank) const { return position_[static_cast<std::size_t>(rank)]; }
  int receiver(int rank, std::size_t host) const {
    return hosts_[host][local_[static_cast<std::size_t>(rank)] % hosts_[host].size()];
  }

  /// What `from` sends to the host at `distance`: what it has received of the `count` hosts up to its own.
  std::vector<MirrorMessage> sent(int from, std::size_t distance, std::size_t count) const {
    const std::size_t here = position(from);
    const std::size_t there = (here + distance) % size();
    std::vector<MirrorMessage> messages;
    for (std::size_t back = 0; back < count; ++back)
      for (const int rank : hosts_[(here + size() - back) % size()])
        if (receiver(rank, here) == from) add(messages, receiver(rank, there), rank);
    return messages;
  }

  /// What `to` receives from the host at `distance` before its own.
  std::vector<MirrorMessage> received(int to, std::size_t distance, std::size_t count) const {
    const std::size_t there = (position(to) + size() - distance) % size();
    std::vector<MirrorMessage> messages;
    for (const int from : hosts_[there])
      for (MirrorMessage& message : sent(from, distance, count))
        if (message.peer == to) messages.push_back({from, std::move(message.ranks)});
    return messages;
  }

 private:
  static void add(std::vector<MirrorMessage>& messages, int peer, int rank) {
    const auto found = std::ranges::find(messages, peer, &MirrorMessage::peer);
    if (found == messages.end())
      messages.push_back({peer, {rank}});
    else
      found->ranks.push_back(rank);
  }

  std::vector<std::vector<int>> hosts_;  // their ranks, ascending
  std::vector<std::size_t> position_;    // of each rank's host
  std::vector<std::size_t> local_;       // of each rank on its host
};

/// base^exponent, or some number of at least `most`.
std::size_t power(std::size_t base, std::size_t exponent, std::size_t most) {
  std::size_t result = 1;
  while (exponent-- > 0 && result < most) result *= base;
  return result;
}

std::size_t radix_for(std::size_t hosts, std::size_t direct) {
  if (hosts <= direct) return std::max<std::size_t>(hosts, 2);
  const std::size_t most = std::min<std::size_t>(direct, MirrorRoutes::kMaxRadix);
  std::size_t steps = 1;
  while (power(most, steps, hosts) < hosts) ++steps;
  std::size_t radix = 2;
  while (power(radix, steps, hosts) < hosts) ++radix;
  return radix;
}

void append(std::vector<MirrorMessage>& to, std::vector<MirrorMessage> more) {
  for (MirrorMessage& message : more) to.push_back(std::move(message));
}

}  // namespace

MirrorRoutes mirror_routes(std::span<const int> hosts, int rank, int direct) {
  const Circle circle(hosts);
  MirrorRoutes routes;
  for (std::size_t other = 0; other < hosts.size(); ++other) {
    const auto other_rank = static_cast<int>(other);
    routes.receivers.push_back(circle.receiver(other_rank, circle.position(rank)));
  }
  const std::size_t radix = radix_for(circle.size(), static_cast<std::size_t>(direct));
  for (std::size_t stride = 1; stride < circle.size(); stride *= radix) {
    MirrorStep& step = routes.steps.emplace_back();
    for (std::size_t times = 1; times < radix && times * stride < circle.size(); ++times) {
      const std::size_t distance = times * stride;
      const std::size_t count = std::min(stride, circle.size() - distance);
      append(step.out, circle.sent(rank, distance, count));
      append(step.in, circle.received(rank, distance, count));
    }
  }
  return routes;
}

}  // namespace multiring
