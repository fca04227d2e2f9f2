#include "support/oracles/plan_simulator.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>
#include <sstream>
#include <stdexcept>

#include "base/arithmetic/reduction.h"
#include "topology/transfers.h"

namespace multiring::testing {
namespace {

/// A sum of the contributions of the ranks in `mask`.
struct Sum {
  Mask mask = 0;
  float value = 0.0F;
};

/// The sums that a rank has of one interval of elements.
using Sums = std::vector<Sum>;

Mask mask_of(int begin, int end) {
  Mask mask = 0;
  for (int rank = begin; rank < end; ++rank) mask |= Mask{1} << rank;
  return mask;
}

void add_nodes(int lo, int hi, std::map<Mask, std::pair<Mask, Mask>>& nodes) {
  if (hi - lo < 2) return;
  int p = 1;
  while (2 * p < hi - lo) p *= 2;
  nodes[mask_of(lo, hi)] = {mask_of(lo, lo + p), mask_of(lo + p, hi)};
  add_nodes(lo, lo + p, nodes);
  add_nodes(lo + p, hi, nodes);
}

struct Message {
  Transfer transfer;
  std::size_t interval = 0;
  Sums sums;
};

class Simulator {
 public:
  explicit Simulator(const Plan& plan) : plan_(plan), size_(plan.cluster().size()) {
    if (size_ > 64) throw std::invalid_argument("too many ranks to simulate");
    nodes_ = canonical_nodes(size_);
    cut_intervals();
    state_.assign(static_cast<std::size_t>(size_), std::vector<Sums>(intervals_.size()));
    for (int rank = 0; rank < size_; ++rank)
      for (std::size_t interval = 0; interval < intervals_.size(); ++interval)
        at(rank, interval) = {{Mask{1} << rank, contribution(rank, interval)}};
  }

  void run() {
    for (const Step& step : plan_.steps())
      for (int hop = 0; hop < hop_count(step); ++hop) run_hop(step, hop);
    for (int rank = 0; rank < size_; ++rank)
      for (std::size_t interval = 0; interval < intervals_.size(); ++interval) check_result(rank, interval);
  }

 private:
  /// Values whose sum depends on the order of additions.
  static float contribution(int rank, std::size_t interval) {
    const auto mixed = static_cast<std::uint32_t>((rank + 1) * 2654435761U + interval * 40503U);
    return static_cast<float>(mixed % 100003U) * (rank % 3 == 0 ? 1.1e3F : rank % 3 == 1 ? -0.37F : 7e-4F);
  }

  Sums& at(int rank, std::size_t interval) { return state_[static_cast<std::size_t>(rank)][interval]; }

  [[noreturn]] void fail(const std::string& what) const { throw std::runtime_error(what); }

  /// Ranges that no transfer divides.
  void cut_intervals() {
    std::set<std::size_t> cuts{0, plan_.count()};
    for (const Step& step : plan_.steps())
      for (int hop = 0; hop < hop_count(step); ++hop)
        for_each_transfer(plan_, step, hop, [&](const Transfer& transfer) {
          cuts.insert({transfer.range.begin, transfer.range.end});
        });
    if (*cuts.rbegin() != plan_.count()) fail("a transfer reaches beyond the elements");
    for (auto cut = cuts.begin(); std::next(cut) != cuts.end(); ++cut)
      intervals_.push_back({*cut, *std::next(cut)});
  }

  void run_hop(const Step& step, int hop) {
    std::vector<Message> messages;
    for_each_transfer(plan_, step, hop, [&](const Transfer& transfer) {
      if (transfer.range.empty() || transfer.from == transfer.to) fail("an empty transfer");
      std::size_t bytes = 0;
      for (std::size_t interval = 0; interval < intervals_.size(); ++interval) {
        if (intersect(intervals_[interval], transfer.range).empty()) continue;
        messages.push_back({transfer, interval, at(transfer.from, interval)});
        bytes += bytes_of(messages.back());
      }
      if (bytes != transfer.bytes)
        fail(name(transfer) + " is said to have " + std::to_string(transfer.bytes) + " bytes and has " +
             std::to_string(bytes));
    });
    for (const Message& message : messages)
      if (message.transfer.kind == TransferKind::kHandOver)
        at(message.transfer.from, message.interval).clear();
    for (const Message& message : messages) receive(message);
  }

  std::size_t bytes_of(const Message& message) const {
    if (message.sums.empty()) fail(name(message.transfer) + " carries what its sender does not have");
    std::size_t each = 0;
    for (const Sum& sum : message.sums) {
      const bool rounded = std::popcount(sum.mask) == 1 || message.transfer.kind == TransferKind::kResult;
      each += rounded ? plan_.element_bytes() : plan_.partial_bytes();
    }
    return each * intervals_[message.interval].size();
  }

  void receive(const Message& message) {
    Sums& own = at(message.transfer.to, message.interval);
    if (message.transfer.kind == TransferKind::kResult) {
      if (!own.empty()) fail(name(message.transfer) + " carries a sum to a rank that has one");
      if (message.sums.size() != 1 || message.sums[0].mask != mask_of(0, size_))
        fail(name(message.transfer) + " carries a sum that is not finished");
      own = message.sums;
      return;
    }
    for (const Sum& sum : message.sums) add(own, sum, message.transfer);
  }

  void add(Sums& own, Sum sum, const Transfer& transfer) const {
    for (const Sum& other : own)
      if ((other.mask & sum.mask) != 0) fail(name(transfer) + " carries a contribution a second time");
    if (!plan_.canonical() && !own.empty()) {
      own[0] = {own[0].mask | sum.mask, own[0].value + sum.value};
      return;
    }
    own.push_back(sum);
    while (join_two(own)) continue;
  }

  /// Joins the children of a node of the canonical tree, if both are there.
  bool join_two(Sums& own) const {
    for (const auto& [mask, children] : nodes_) {
      const auto left = std::ranges::find(own, children.first, &Sum::mask);
      const auto right = std::ranges::find(own, children.second, &Sum::mask);
      if (left == own.end() || right == own.end()) continue;
      const Sum joined{mask, left->value + right->value};
      std::erase_if(own, [&](const Sum& sum) { return (sum.mask & mask) != 0; });
      own.push_back(joined);
      return true;
    }
    return false;
  }

  void check_result(int rank, std::size_t interval) {
    const Sums& own = at(rank, interval);
    if (own.size() != 1 || own[0].mask != mask_of(0, size_))
      fail("rank " + std::to_string(rank) + " has not the whole sum");
    if (!plan_.canonical()) return;
    std::vector<float> values;
    for (int other = 0; other < size_; ++other) values.push_back(contribution(other, interval));
    std::vector<const void*> inputs;
    for (const float& value : values) inputs.push_back(&value);
    float expected = 0.0F;
    void* const outputs[] = {&expected};
    reduce(DType::kFloat32, {}, inputs, outputs, 1);
    if (std::memcmp(&expected, &own[0].value, sizeof(float)) != 0)
      fail("rank " + std::to_string(rank) + " has other bits than base/arithmetic/reduction.h gives");
  }

  static std::string name(const Transfer& transfer) {
    return "the transfer of [" + std::to_string(transfer.range.begin) + ", " +
           std::to_string(transfer.range.end) + ") from rank " + std::to_string(transfer.from) + " to " +
           std::to_string(transfer.to);
  }

  const Plan& plan_;
  const int size_;
  std::map<Mask, std::pair<Mask, Mask>> nodes_;
  std::vector<Range> intervals_;
  std::vector<std::vector<Sums>> state_;  // by rank and interval
};

}  // namespace

std::map<Mask, std::pair<Mask, Mask>> canonical_nodes(int size) {
  std::map<Mask, std::pair<Mask, Mask>> nodes;
  add_nodes(0, size, nodes);
  return nodes;
}

std::string simulate(const Plan& plan) {
  try {
    Simulator(plan).run();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return {};
}

std::vector<Cluster> clusters_to_try() {
  std::vector<std::vector<int>> layouts{{1, 3}, {3, 1}, {2, 1, 2}, {4, 3, 2, 1}, {1, 2, 1, 1, 5}, {6, 2, 4}};
  for (const int hosts : {1, 2, 3, 4, 7})
    for (const int ranks : {1, 2, 3, 4}) layouts.emplace_back(static_cast<std::size_t>(hosts), ranks);
  std::vector<Cluster> clusters;
  for (const std::vector<int>& layout : layouts)
    for (const Placement placement : {Placement::kBlocks, Placement::kRoundRobin})
      clusters.push_back(make_cluster(layout, {{1.25e9, 20e-6}}, {}, placement));
  return clusters;
}

std::string describe(const Cluster& cluster) {
  std::ostringstream text;
  for (const Host& host : cluster.hosts) {
    text << "[";
    for (const int rank : host.ranks) text << rank << (rank == host.ranks.back() ? "" : " ");
    text << "]x" << host.interfaces.size();
  }
  return text.str();
}

}  // namespace multiring::testing
