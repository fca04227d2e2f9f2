#include "collective/plan/plan_schedule.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/cache.h"
#include "topology/transfers.h"

namespace multiring {
namespace {

class Scheduler {
 public:
  Scheduler(const Plan& plan, int rank) : plan_(plan), rank_(rank) {}

  RankSchedule build() {
    schedule_.order = plan_.canonical() ? Order::kCanonical : Order::kAny;
    find_share();
    schedule_.result = allocate(schedule_.share.size() * plan_.element_bytes());
    for (const Step& step : plan_.steps())
      if (step.across_hosts()) add_step(step);
    schedule_.bytes = end_;
    return std::move(schedule_);
  }

 private:
  using Sum = RankSchedule::Sum;
  using Message = RankSchedule::Message;
  /// A sum that this rank has, for a range of elements.
  struct Held {
    Range range;
    Sum sum;
  };
  /// Whose contributions a member of a group has summed.
  struct Summed {
    std::vector<int> at_first;                      ///< of every range, when the step begins
    std::map<std::size_t, std::vector<int>> later;  ///< by the begins of ranges that something came for

    const std::vector<int>& of(Range range) const {
      const auto found = later.find(range.begin);
      return found == later.end() ? at_first : found->second;
    }
    void add(Range range, const std::vector<int>& ranks) {
      std::vector<int>& sum = later.try_emplace(range.begin, at_first).first->second;
      sum.insert(sum.end(), ranks.begin(), ranks.end());
      std::ranges::sort(sum);
    }
  };

  std::size_t allocate(std::size_t bytes) {
    const std::size_t offset = end_;
    end_ += round_up(bytes, kCacheLine);
    return offset;
  }

  bool is_all(Subtree node) const { return node.size() == plan_.cluster().size(); }
  std::size_t bytes_of(Subtree node) const {
    return node.size() == 1 || is_all(node) ? plan_.element_bytes() : plan_.partial_bytes();
  }
  std::vector<Subtree> nodes_of(const std::vector<int>& ranks) const {
    if (plan_.canonical()) return canonical_parts(ranks, plan_.cluster().size());
    const int lowest = *std::ranges::min_element(ranks);
    return {{lowest, lowest + static_cast<int>(ranks.size())}};
  }
  std::size_t result_at(std::size_t element) const {
    return schedule_.result + (element - schedule_.share.begin) * plan_.element_bytes();
  }

  void find_share() {
    const int host = plan_.cluster().host_of_rank()[static_cast<std::size_t>(rank_)];
    const std::vector<int>& local_ranks = plan_.cluster().hosts[static_cast<std::size_t>(host)].ranks;
    schedule_.host_shares = plan_.host_shares(plan_.cluster().hosts[static_cast<std::size_t>(host)]);
    const auto local_rank = std::ranges::find(local_ranks, rank_) - local_ranks.begin();
    schedule_.share = schedule_.host_shares[static_cast<std::size_t>(local_rank)];
    if (plan_.blocks()) schedule_.block = plan_.blocks()->of(rank_);
    if (schedule_.share.empty() || !adds(plan_.collective())) return;
    for (const Subtree node : nodes_of(local_ranks)) {
      const Sum sum{node, allocate(schedule_.share.size() * bytes_of(node))};
      schedule_.host_sums.push_back(sum);
      held_.push_back({schedule_.share, sum});
    }
  }

  void add_step(const Step& step) {
    const int hops = hop_count(step);
    const std::size_t first = schedule_.steps.size();
    schedule_.steps.resize(first + static_cast<std::size_t>(hops));
    for (const Group& group : step.groups) {
      if (std::ranges::find(group.ranks, rank_) == group.ranks.end()) continue;
      std::vector<Summed> summed;
      if (!step.holdings.empty())
        for (std::size_t member = 0; member < group.ranks.size(); ++member)
          summed.push_back({step.holdings[group.first_holding + member].ranks, {}});
      for (int hop = 0; hop < hops; ++hop)
        add_hop(step, group, hop, summed, schedule_.steps[first + static_cast<std::size_t>(hop)]);
    }
  }

  /// `summed`: what each member of the group has summed, by position; afterwards, what it has then.
  void add_hop(const Step& step, const Group& group, int hop, std::vector<Summed>& summed,
               RankSchedule::Step& out) {
    const std::vector<int>& ranks = group.ranks;
    const auto position = [&](int rank) {
      return static_cast<std::size_t>(std::ranges::find(ranks, rank) - ranks.begin());
    };
    struct Arrival {
      std::size_t at;
      Range range;
      std::vector<int> ranks;
    };
    std::vector<Arrival> arrivals;                    // count after the hop
    std::map<std::size_t, RankSchedule::Join> joins;  // by the range's begin
    std::vector<Range> handed_over;
    for_each_transfer(plan_, step, group, hop, [&](const Transfer& transfer) {
      const bool result = transfer.kind == TransferKind::kResult;
      if (transfer.from == rank_) {
        out.sends.push_back(result ? result_message(transfer.to, transfer.range)
                                   : held_message(transfer.to, transfer.range));
        if (transfer.kind == TransferKind::kHandOver) handed_over.push_back(transfer.range);
      }
      if (transfer.to == rank_ && result)
        out.receives.push_back(result_message(transfer.from, transfer.range));
      if (result) return;
      Summed& source = summed[position(transfer.from)];
      const std::vector<int>& came = source.of(transfer.range);
      if (transfer.to == rank_) {
        RankSchedule::Join& join = joins[transfer.range.begin];
        join.range = transfer.range;
        out.receives.push_back(receive(transfer.from, transfer.range, nodes_of(came), join));
      }
      arrivals.push_back({position(transfer.to), transfer.range, came});
      if (transfer.kind == TransferKind::kHandOver) source.later.erase(transfer.range.begin);
    });
    for (const auto& [at, range, ranks_of_sum] : arrivals) summed[at].add(range, ranks_of_sum);
    for (auto& [begin, join] : joins) {
      finish(join, summed[position(rank_)].of(join.range));
      out.joins.push_back(std::move(join));
    }
    for (const Range range : handed_over) drop(range);
  }

  /// Allocates room for what comes, the sums one after the other.
  Message receive(int peer, Range range, const std::vector<Subtree>& nodes, RankSchedule::Join& join) {
    std::size_t bytes = 0;
    for (const Subtree node : nodes) bytes += range.size() * bytes_of(node);
    const std::size_t offset = allocate(bytes);
    std::size_t at = offset;
    for (const Subtree node : nodes) {
      join.inputs.push_back({node, at});
      at += range.size() * bytes_of(node);
    }
    return {peer, {{offset, bytes}}};
  }

  /// Adds what this rank holds of the range: it then holds the sums of `ranks`.
  void finish(RankSchedule::Join& join, const std::vector<int>& ranks) {
    for (const Held& held : held_)
      if (held.range.begin <= join.range.begin && join.range.end <= held.range.end)
        join.inputs.push_back({held.sum.node, offset_in(held, join.range)});
    std::ranges::sort(join.inputs, {}, &Sum::node);
    drop(join.range);
    for (const Subtree node : nodes_of(ranks)) {
      const std::size_t offset =
          is_all(node) ? result_at(join.range.begin) : allocate(join.range.size() * bytes_of(node));
      join.outputs.push_back({node, offset});
      held_.push_back({join.range, join.outputs.back()});
    }
  }

  std::size_t offset_in(const Held& held, Range range) const {
    return held.sum.offset + (range.begin - held.range.begin) * bytes_of(held.sum.node);
  }

  Message held_message(int peer, Range range) const {
    Message message{peer, {}};
    std::vector<Held> held;
    for (const Held& each : held_)
      if (each.range.begin <= range.begin && range.end <= each.range.end) held.push_back(each);
    std::ranges::sort(held, {}, [](const Held& each) { return each.sum.node; });
    for (const Held& each : held)
      message.parts.push_back({offset_in(each, range), range.size() * bytes_of(each.sum.node)});
    return message;
  }

  Message result_message(int peer, Range range) const {
    return {peer, {{result_at(range.begin), range.size() * plan_.element_bytes()}}};
  }

  /// Drops what this rank holds of `range`.
  void drop(Range range) {
    std::vector<Held> left;
    for (const Held& held : held_) {
      if (intersect(held.range, range).empty()) {
        left.push_back(held);
        continue;
      }
      for (const Range part : {Range{held.range.begin, range.begin}, Range{range.end, held.range.end}})
        if (part.begin < part.end) left.push_back({part, {held.sum.node, offset_in(held, part)}});
    }
    held_ = std::move(left);
  }

  const Plan& plan_;
  const int rank_;
  RankSchedule schedule_;
  std::vector<Held> held_;
  std::size_t end_ = 0;
};

}  // namespace

RankSchedule make_schedule(const Plan& plan, int rank) { return Scheduler(plan, rank).build(); }

}  // namespace multiring
