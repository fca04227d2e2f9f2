#include "transport/cluster/mirror_routes.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>

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

  /// What `from` sends to host `there`: what it has received of the hosts `origins`.
  std::vector<MirrorMessage> sent(int from, std::size_t there, std::span<const std::size_t> origins) const {
    std::vector<MirrorMessage> messages;
    for (const std::size_t origin : origins)
      for (const int rank : hosts_[origin])
        if (receiver(rank, position(from)) == from) add(messages, receiver(rank, there), rank);
    return messages;
  }

  /// What `to` receives from host `there`, which has it from the hosts `origins`.
  std::vector<MirrorMessage> received(int to, std::size_t there, std::span<const std::size_t> origins) const {
    std::vector<MirrorMessage> messages;
    for (const int from : hosts_[there])
      for (MirrorMessage& message : sent(from, position(to), origins))
        if (message.peer == to) messages.push_back({from, std::move(message.ranks)});
    return messages;
  }

  /// `count` hosts up to `host`, backwards.
  std::vector<std::size_t> up_to(std::size_t host, std::size_t count) const {
    std::vector<std::size_t> found;
    for (std::size_t back = 0; back < count; ++back) found.push_back((host + size() - back) % size());
    return found;
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

/// On host `here`, of every rank.
std::vector<int> receivers_of(const Circle& circle, std::size_t ranks, std::size_t here) {
  std::vector<int> receivers;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    receivers.push_back(circle.receiver(static_cast<int>(rank), here));
  return receivers;
}

void append(std::vector<MirrorMessage>& to, std::vector<MirrorMessage> more) {
  for (MirrorMessage& message : more) to.push_back(std::move(message));
}

}  // namespace

MirrorRoutes mirror_routes(std::span<const int> hosts, int rank, int direct) {
  const Circle circle(hosts);
  const std::size_t here = circle.position(rank);
  MirrorRoutes routes;
  routes.receivers = receivers_of(circle, hosts.size(), here);
  const std::size_t radix = radix_for(circle.size(), static_cast<std::size_t>(direct));
  for (std::size_t stride = 1; stride < circle.size(); stride *= radix) {
    MirrorStep& step = routes.steps.emplace_back();
    for (std::size_t times = 1; times < radix && times * stride < circle.size(); ++times) {
      const std::size_t distance = times * stride;
      const std::size_t count = std::min(stride, circle.size() - distance);
      const std::size_t before = (here + circle.size() - distance) % circle.size();
      append(step.out, circle.sent(rank, (here + distance) % circle.size(), circle.up_to(here, count)));
      append(step.in, circle.received(rank, before, circle.up_to(before, count)));
    }
  }
  return routes;
}

MirrorRoutes neighbour_routes(std::span<const int> hosts, int rank, bool closed) {
  const Circle circle(hosts);
  const std::size_t size = circle.size();
  const std::size_t here = circle.position(rank);
  MirrorRoutes routes;
  routes.receivers = receivers_of(circle, hosts.size(), here);
  const std::size_t farthest = closed ? size / 2 : size - 1;
  for (std::size_t distance = 1; distance <= farthest; ++distance) {
    MirrorStep& step = routes.steps.emplace_back();
    // Of the host on the other side, `distance` before `to`.
    const auto pass_on = [&](std::size_t from, std::size_t to, std::size_t origin) {
      if (from == here) append(step.out, circle.sent(rank, to, {{origin}}));
      if (to == here) append(step.in, circle.received(rank, from, {{origin}}));
    };
    for (const std::size_t from : std::set{(here + size - 1) % size, here, (here + 1) % size}) {
      const bool opposite = closed && 2 * distance == size;  // comes one way only
      if (closed || (from + 1 < size && from + 1 >= distance))
        pass_on(from, (from + 1) % size, (from + 1 + size - distance) % size);
      if (!opposite && (closed || (from > 0 && from - 1 + distance < size)))
        pass_on(from, (from + size - 1) % size, (from + size - 1 + distance) % size);
    }
  }
  return routes;
}

}  // namespace multiring
