// Positions are those of members in their group; n is the size of a group.

#include "topology/transfers.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <unordered_map>
#include <vector>

#include "base/cache.h"

namespace multiring {
namespace {

int log2_ceiling(std::size_t n) { return static_cast<int>(std::bit_width(n - 1)); }

int hops_of_group(const Step& step, std::size_t n) {
  switch (step.algorithm) {
    case Algorithm::kPairwise:
      return 1;
    case Algorithm::kRing:
    case Algorithm::kChain:
      return static_cast<int>(n) - 1;
    case Algorithm::kDoubling: {
      const std::size_t core = std::bit_floor(n);
      return log2_ceiling(core) + (core < n ? 2 : 0);
    }
    case Algorithm::kTree:
      break;
  }
  return step.across_hosts() ? log2_ceiling(n) : 1;
}

/// The transfers of one hop in all groups of a step.
class Hop {
 public:
  Hop(const Plan& plan, const Step& step, int hop, const std::function<void(const Transfer&)>& visit)
      : plan_(plan), step_(step), hop_(static_cast<std::size_t>(hop)), visit_(visit) {}

  void visit_group(const Group& group) {
    if (static_cast<int>(hop_) >= hops_of_group(step_, group.ranks.size())) return;
    group_ = &group;
    n_ = group.ranks.size();
    switch (step_.algorithm) {
      case Algorithm::kPairwise:
        return pairwise();
      case Algorithm::kRing:
        return ring();
      case Algorithm::kDoubling:
        return doubling();
      case Algorithm::kTree:
        return step_.across_hosts() ? tree() : flat_tree();
      case Algorithm::kChain:
        return chain();
    }
  }

 private:
  bool reducing() const { return !step_.holdings.empty(); }

  void send(std::size_t from, std::size_t to, Range range, TransferKind kind, std::size_t bytes_per_element) {
    if (range.empty()) return;
    visit_({group_->ranks[from], group_->ranks[to], range, kind, group_->channel,
            bytes_per_element * range.size()});
  }

  void send_result(std::size_t from, std::size_t to, Range range) {
    send(from, to, range, TransferKind::kResult, plan_.element_bytes());
  }

  /// Positions that own a part of the range.
  Range owners() const {
    if (group_->owner < 0) return {0, n_};
    const auto owner = static_cast<std::size_t>(group_->owner);
    return {owner, owner + 1};
  }

  std::size_t held_bytes(std::size_t position) const {
    return step_.holdings[group_->first_holding + position].bytes_per_element;
  }

  /// Bytes of an element of what the members `positions` brought, summed as far as the order allows.
  /// `sender` stands for them, with whether it is the first of them: it is the same set for every group of
  /// the same hosts.
  std::size_t joint_bytes(std::size_t sender, const std::vector<std::size_t>& positions) {
    if (positions.size() == 1) return held_bytes(positions[0]);
    const std::size_t from = 2 * (group_->first_holding + sender) + (positions[0] == sender ? 1 : 0);
    const auto [entry, is_new] = joint_bytes_.try_emplace(from, 0);
    if (!is_new) return entry->second;
    std::vector<int> ranks;
    for (const std::size_t position : positions) {
      const std::vector<int>& more = step_.holdings[group_->first_holding + position].ranks;
      ranks.insert(ranks.end(), more.begin(), more.end());
    }
    std::ranges::sort(ranks);
    return entry->second = plan_.holding(std::move(ranks)).bytes_per_element;
  }

  void pairwise() {
    const Range all{0, n_};
    const Range senders = reducing() ? all : owners();
    const Range receivers = reducing() ? owners() : all;
    for (std::size_t from = senders.begin; from < senders.end; ++from) {
      for (std::size_t to = receivers.begin; to < receivers.end; ++to) {
        if (from == to) continue;
        if (reducing())
          send(from, to, plan_.share(*group_, to), TransferKind::kHandOver, held_bytes(from));
        else
          send_result(from, to, plan_.share(*group_, from));
      }
    }
  }

  /// Chunk c starts at position c + 1 and has come round to its owner c after n - 1 hops; then it starts
  /// there and goes round once more. Backwards, positions count from the other end.
  void ring() {
    const auto position = [this](std::size_t step) { return group_->backward ? n_ - 1 - step : step; };
    for (std::size_t chunk = owners().begin; chunk < owners().end; ++chunk) {
      const Range range = plan_.share(*group_, chunk);
      const std::size_t step = position(chunk) + hop_ + (reducing() ? 1 : 0);
      const std::size_t from = position(step % n_);
      const std::size_t to = position((step + 1) % n_);
      if (reducing())
        send(from, to, range, TransferKind::kHandOver, hop_ == 0 ? held_bytes(from) : plan_.partial_bytes());
      else
        send_result(from, to, range);
    }
  }

  /// In hop h the chunks beyond position h leave it upwards, and those before position n - 1 - h leave that
  /// downwards, with all that has come to it. Then every chunk's sum passes from its owner to both ends.
  void chain() {
    if (!reducing()) {
      for (std::size_t chunk = owners().begin; chunk < owners().end; ++chunk) {
        const Range range = plan_.share(*group_, chunk);
        if (chunk + hop_ + 1 < n_) send_result(chunk + hop_, chunk + hop_ + 1, range);
        if (chunk > hop_) send_result(chunk - hop_, chunk - hop_ - 1, range);
      }
      return;
    }
    const std::size_t up = hop_;
    const std::size_t down = n_ - 1 - hop_;
    const std::size_t up_bytes = joint_bytes(up, positions(0, up + 1));
    const std::size_t down_bytes = joint_bytes(down, positions(down, n_));
    for (std::size_t chunk = owners().begin; chunk < owners().end; ++chunk) {
      const Range range = plan_.share(*group_, chunk);
      if (chunk > up) send(up, up + 1, range, TransferKind::kHandOver, up_bytes);
      if (chunk < down) send(down, down - 1, range, TransferKind::kHandOver, down_bytes);
    }
  }

  static std::vector<std::size_t> positions(std::size_t begin, std::size_t end) {
    std::vector<std::size_t> found(end - begin);
    std::iota(found.begin(), found.end(), begin);
    return found;
  }

  /// Position p joins p - 2^hop, which makes sums of aligned blocks, as the canonical tree has them. Back
  /// in the opposite order.
  void tree() {
    const std::size_t level = reducing() ? hop_ : static_cast<std::size_t>(log2_ceiling(n_)) - 1 - hop_;
    const std::size_t distance = std::size_t{1} << level;
    for (std::size_t near = 0; near + distance < n_; near += 2 * distance) {
      const std::size_t far = near + distance;
      if (!reducing()) {
        send_result(near, far, group_->range);
        continue;
      }
      std::vector<std::size_t> joined;
      for (std::size_t position = far; position < std::min(far + distance, n_); ++position)
        joined.push_back(position);
      send(far, near, group_->range, TransferKind::kHandOver, joint_bytes(far, joined));
    }
  }

  void flat_tree() {
    for (std::size_t other = 1; other < n_; ++other) {
      if (reducing())
        send(other, 0, group_->range, TransferKind::kHandOver, held_bytes(other));
      else
        send_result(0, other, group_->range);
    }
  }

  /// Positions beyond the largest power of two join one within it before, and get the sum from it afterwards.
  void doubling() {
    const std::size_t core = std::bit_floor(n_);
    const std::size_t extra = n_ - core;
    const auto last = static_cast<std::size_t>(hops_of_group(step_, n_)) - 1;
    if (extra > 0 && hop_ == 0) {
      for (std::size_t position = 0; position < extra; ++position)
        send(core + position, position, group_->range, TransferKind::kHandOver, held_bytes(core + position));
      return;
    }
    if (extra > 0 && hop_ == last) {
      for (std::size_t position = 0; position < extra; ++position)
        send_result(position, core + position, group_->range);
      return;
    }
    const std::size_t distance = std::size_t{1} << (extra > 0 ? hop_ - 1 : hop_);
    for (std::size_t from = 0; from < core; ++from) {
      std::vector<std::size_t> joined;
      const std::size_t block = from / distance * distance;
      for (std::size_t position = block; position < block + distance; ++position) {
        joined.push_back(position);
        if (position < extra) joined.push_back(core + position);
      }
      send(from, from ^ distance, group_->range, TransferKind::kExchange, joint_bytes(from, joined));
    }
  }

  const Plan& plan_;
  const Step& step_;
  const std::size_t hop_;
  const std::function<void(const Transfer&)>& visit_;
  std::unordered_map<std::size_t, std::size_t> joint_bytes_;
  const Group* group_ = nullptr;
  std::size_t n_ = 0;
};

}  // namespace

int hop_count(const Step& step) {
  int most = 0;
  for (const Group& group : step.groups) most = std::max(most, hops_of_group(step, group.ranks.size()));
  return most;
}

void for_each_transfer(const Plan& plan, const Step& step, int hop,
                       const std::function<void(const Transfer&)>& visit) {
  Hop transfers(plan, step, hop, visit);
  for (const Group& group : step.groups) transfers.visit_group(group);
}

void for_each_transfer(const Plan& plan, const Step& step, const Group& group, int hop,
                       const std::function<void(const Transfer&)>& visit) {
  Hop(plan, step, hop, visit).visit_group(group);
}

std::optional<std::pair<int, int>> missing_link(const Cluster& cluster, PlanOptions options) {
  if (cluster.fully_linked()) return std::nullopt;
  // Enough elements for every rank to have some. Who sends to whom is the same in any order.
  options.count = kCacheLine * static_cast<std::size_t>(cluster.size());
  options.blocks.assign(static_cast<std::size_t>(cluster.size()), kCacheLine);
  options.order = Order::kAny;
  const Plan plan(cluster, options);
  const std::vector<int> hosts = cluster.host_of_rank();
  std::optional<std::pair<int, int>> found;
  for (const Step& step : plan.steps())
    for (int hop = 0; hop < hop_count(step) && !found; ++hop)
      for_each_transfer(plan, step, hop, [&](const Transfer& transfer) {
        const int from = hosts[static_cast<std::size_t>(transfer.from)];
        const int to = hosts[static_cast<std::size_t>(transfer.to)];
        if (!found && !have_link(cluster.links, cluster.host_count(), from, to)) found = {from, to};
      });
  return found;
}

}  // namespace multiring
