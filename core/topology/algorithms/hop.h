#pragma once

#include <cstddef>
#include <functional>
#include <unordered_map>
#include <vector>

#include "topology/transfers.h"

namespace multiring {

/// One hop of a step, which asks its algorithm for the transfers of one group after the other. Positions are
/// those of members in their group.
class Hop {
 public:
  Hop(const Plan& plan, const Step& step, int hop, const std::function<void(const Transfer&)>& visit)
      : plan_(plan), step_(step), number_(static_cast<std::size_t>(hop)), visit_(visit) {}

  void visit_group(const Group& group);

  // For algorithms, of the group that is visited.

  std::size_t number() const { return number_; }
  /// Members of the group.
  std::size_t size() const { return group_->ranks.size(); }
  bool across_hosts() const { return step_.across_hosts(); }
  /// Whether sums are on their way to their owners, and not the results back.
  bool reducing() const { return !step_.holdings.empty(); }
  bool backward() const { return group_->backward; }
  Range range() const { return group_->range; }

  /// Positions that own a part of the range.
  Range owners() const {
    if (group_->owner < 0) return {0, size()};
    const auto owner = static_cast<std::size_t>(group_->owner);
    return {owner, owner + 1};
  }
  /// The chunk of the owner at a position.
  Range share(std::size_t position) const { return plan_.share(*group_, position); }

  /// Bytes of an element of what a member brought to the step.
  std::size_t held_bytes(std::size_t position) const {
    return step_.holdings[group_->first_holding + position].bytes_per_element;
  }
  /// The same of what the members `positions` brought, summed as far as the order allows. `sender` stands for
  /// them, with whether it is the first of them: it is the same set for every group of the same hosts.
  std::size_t joint_bytes(std::size_t sender, const std::vector<std::size_t>& positions);
  std::size_t joint_bytes(std::size_t sender, Range positions);
  /// The same of any sum, where the order is any.
  std::size_t partial_bytes() const { return plan_.partial_bytes(); }

  void send(std::size_t from, std::size_t to, Range range, TransferKind kind,
            std::size_t bytes_per_element) const {
    if (range.empty()) return;
    visit_({group_->ranks[from], group_->ranks[to], range, kind, group_->channel,
            bytes_per_element * range.size()});
  }
  void send_result(std::size_t from, std::size_t to, Range range) const {
    send(from, to, range, TransferKind::kResult, plan_.element_bytes());
  }

 private:
  const Plan& plan_;
  const Step& step_;
  const std::size_t number_;
  const std::function<void(const Transfer&)>& visit_;
  std::unordered_map<std::size_t, std::size_t> joint_bytes_;  // for all groups, which are many
  const Group* group_ = nullptr;
};

}  // namespace multiring
