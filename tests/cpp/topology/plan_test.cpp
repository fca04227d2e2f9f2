// Plans, executed transfer by transfer: everybody gets the canonical sum, and no byte travels twice.

#include "topology/plan.h"

#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/errors.h"
#include "support/oracles/plan_simulator.h"
#include "topology/traffic.h"

namespace multiring {
namespace {

using namespace testing;

constexpr std::size_t kLarge = (std::size_t{1} << 33) + 7;
constexpr std::size_t kCounts[] = {0, 1, 2, 17, 101, 1000, 4099, kLarge};

/// All combinations of algorithms for a mode that a plan takes.
std::vector<Mode> combinations(const Mode& mode, Order order = Order::kCanonical) {
  std::vector<Mode> modes{mode};
  for (std::size_t index = 0; index < mode.size(); ++index) {
    std::vector<Mode> more;
    for (const Mode& known : modes) {
      for (const Algorithm algorithm : kAllAlgorithms) {
        const bool is_last = index + 1 == mode.size();
        if (!is_last && traits_of(algorithm).reducing_phase == Phase::kAllreduce) continue;
        if (order == Order::kCanonical && needs_any_order({mode[index].size, algorithm})) continue;
        more.push_back(known);
        more.back()[index].algorithm = algorithm;
      }
    }
    modes = more;
  }
  return modes;
}

PlanOptions options_for(const Mode& mode, std::size_t count, Order order = Order::kCanonical) {
  PlanOptions options;
  options.mode = mode;
  options.count = count;
  options.order = order;
  return options;
}

/// The hosts that a mode is for.
Cluster cluster_of(const Mode& mode, Placement placement = Placement::kBlocks) {
  std::vector<int> layout{mode[0].size};
  for (std::size_t index = 1; index < mode.size(); ++index)
    layout.resize(layout.size() * static_cast<std::size_t>(mode[index].size), layout[0]);
  return make_cluster(layout, {{1e9, 0.0}}, {}, placement);
}

void expect_correct(const Cluster& cluster, const PlanOptions& options) {
  const Plan plan(cluster, options);
  EXPECT_EQ(simulate(plan), "") << describe(cluster) << ", mode " << format_mode(plan.mode()) << ", "
                                << plan.count() << " elements, " << order_name(plan.order());
}

TEST(Plan, EveryAlgorithmSumsOnEveryClusterAndCount) {
  for (const Cluster& cluster : clusters_to_try())
    for (const Order order : {Order::kCanonical, Order::kAny})
      for (const Mode& mode : combinations(flat_mode(cluster), order))
        for (const std::size_t count : kCounts) expect_correct(cluster, options_for(mode, count, order));
}

TEST(Plan, SumsInThreeAndFourDimensions) {
  for (const char* const text : {"2x3x2", "1x2x4", "3x2x2", "2x2x2x2", "4x1x3", "1x3x3", "2x4x1"}) {
    const Mode sizes = parse_mode(text);
    for (const Placement placement : {Placement::kBlocks, Placement::kRoundRobin})
      for (const Order order : {Order::kCanonical, Order::kAny})
        for (const Mode& mode : combinations(sizes, order))
          for (const std::size_t count : {std::size_t{1}, std::size_t{1003}})
            expect_correct(cluster_of(sizes, placement), options_for(mode, count, order));
  }
}

// Of hosts that differ each counts as the largest.
TEST(Plan, SumsInSeveralDimensionsOfHostsThatDiffer) {
  const std::pair<std::vector<int>, const char*> clusters[] = {
      {{1, 3, 2, 2}, "3x2x2"}, {{4, 1, 1, 2, 3, 1}, "4x3x2"}, {{1, 2, 1, 1, 2, 3, 1, 1}, "3x2x2x2"}};
  for (const auto& [layout, text] : clusters)
    for (const Placement placement : {Placement::kBlocks, Placement::kRoundRobin})
      for (const Order order : {Order::kCanonical, Order::kAny})
        for (const Mode& mode : combinations(parse_mode(text), order))
          for (const std::size_t count : {std::size_t{1}, std::size_t{1003}})
            expect_correct(make_cluster(layout, {{1e9, 0.0}}, {}, placement),
                           options_for(mode, count, order));
}

TEST(Plan, SumsOverStripesOfUnequalInterfaces) {
  for (Cluster cluster : clusters_to_try()) {
    for (std::size_t host = 0; host < cluster.hosts.size(); ++host) {
      cluster.hosts[host].interfaces = {{1e9, 0.0}, {0.25e9, 0.0}, {3e9, 0.0}};
      if (host % 3 == 1) cluster.hosts[host].interfaces.pop_back();
    }
    for (const Mode& mode : combinations(flat_mode(cluster)))
      for (const std::size_t count : {std::size_t{1}, std::size_t{5000}, kLarge})
        expect_correct(cluster, options_for(mode, count));
  }
}

TEST(Plan, HalfPrecisionSendsPartialSumsInFloat32) {
  for (const Cluster& cluster : clusters_to_try()) {
    PlanOptions options = options_for({}, 1001);
    options.dtype = DType::kBFloat16;
    expect_correct(cluster, options);
  }
  PlanOptions options = options_for({}, 1 << 20);
  options.dtype = DType::kFloat16;
  const Plan plan(make_cluster(std::vector{2, 2}, {{1e9, 0.0}}), options);
  const Traffic traffic = total_traffic(plan);
  EXPECT_EQ(traffic.links()[0].sent, (1 << 19) * (4U + 2U)) << "a half each way, the first in float32";
}

TEST(Plan, ChunksStartAtCacheLines) {
  for (const Cluster& cluster : clusters_to_try()) {
    const Plan plan(cluster, options_for({}, 4099));
    for (const Step& step : plan.steps())
      for (int hop = 0; hop < hop_count(step); ++hop)
        for_each_transfer(plan, step, hop, [](const Transfer& transfer) {
          ASSERT_EQ(transfer.range.begin * sizeof(float) % 64, 0U);
          ASSERT_TRUE(transfer.range.end == 4099 || transfer.range.end * sizeof(float) % 64 == 0);
        });
  }
}

/// Bytes that every host must send for `count` float32 elements: 2 * (hosts - 1) / hosts of them.
void expect_least_bytes(const Cluster& cluster, const PlanOptions& options) {
  const Plan plan(cluster, options);
  const Traffic traffic = total_traffic(plan);
  const auto hosts = static_cast<double>(cluster.host_count());
  const double due = 2.0 * (hosts - 1.0) / hosts * static_cast<double>(options.count) * sizeof(float);
  for (int host = 0; host < cluster.host_count(); ++host) {
    double sent = 0.0;
    double received = 0.0;
    for (const LinkTraffic& link : traffic.links()) {
      if (link.host != host) continue;
      sent += static_cast<double>(link.sent);
      received += static_cast<double>(link.received);
    }
    EXPECT_DOUBLE_EQ(sent, due) << describe(cluster) << ", mode " << format_mode(plan.mode());
    EXPECT_DOUBLE_EQ(received, due) << describe(cluster) << ", mode " << format_mode(plan.mode());
  }
}

// Divisible by every hosts x ranks and by cache lines, so that all shares are equal.
constexpr std::size_t kDivisible = std::size_t{16} * 32 * 9 * 5 * 7;

TEST(Plan, SendsTheLeastBytesWhereHostsAreAligned) {
  int aligned = 0;
  for (const Cluster& cluster : clusters_to_try()) {
    if (!cluster.regular() || cluster.host_count() == 1) continue;
    if (cluster.aligned()) {
      ++aligned;
      expect_least_bytes(cluster, options_for({}, kDivisible));
    }
    for (const Algorithm algorithm : {Algorithm::kPairwise, Algorithm::kRing}) {
      Mode mode = flat_mode(cluster);
      mode[1].algorithm = algorithm;
      expect_least_bytes(cluster, options_for(mode, kDivisible, Order::kAny));
    }
  }
  EXPECT_GT(aligned, 10);
  for (const char* const text : {"2x4x2", "4x2x4", "2x2x2x2"})
    expect_least_bytes(cluster_of(parse_mode(text)), options_for(parse_mode(text), kDivisible));
}

TEST(Plan, HostsThatAreNoSubtreeSendOneSumForEachPart) {
  const Cluster dealt = make_cluster(std::vector{4, 4}, {{1e9, 0.0}}, {}, Placement::kRoundRobin);
  const Plan raw(dealt, options_for({}, 1 << 16));
  EXPECT_EQ(raw.parts_across_hosts(), 4U) << "ranks 0, 2, 4, 6 have no sum in common";
  const std::size_t half = (std::size_t{1} << 15) * sizeof(float);
  EXPECT_EQ(total_traffic(raw).links()[0].sent, (4 + 1) * half);
  const Plan summed(dealt, options_for({}, 1 << 16, Order::kAny));
  EXPECT_EQ(summed.parts_across_hosts(), 1U);
  EXPECT_EQ(total_traffic(summed).links()[0].sent, (1 + 1) * half);
  const Plan threes(make_cluster(std::vector{3, 3}, {{1e9, 0.0}}), options_for({}, 1 << 16));
  EXPECT_EQ(threes.parts_across_hosts(), 2U) << "ranks 0 and 1 are summed, 2 is not";
  const Plan aligned(make_cluster(std::vector{4, 4, 4}, {{1e9, 0.0}}), options_for({}, 1 << 16));
  EXPECT_EQ(aligned.parts_across_hosts(), 1U);
}

TEST(Plan, StripesFollowTheSpeeds) {
  const Cluster cluster = make_cluster(std::vector{2, 2, 2, 2}, {{500e6, 0.0}, {125e6, 0.0}});
  const Plan plan(cluster, options_for({}, 1 << 22));
  const Traffic traffic = total_traffic(plan);
  for (std::size_t host = 0; host < 4; ++host) {
    const auto fast = static_cast<double>(traffic.links()[2 * host].sent);
    const auto slow = static_cast<double>(traffic.links()[2 * host + 1].sent);
    EXPECT_NEAR(slow / (fast + slow), 0.2, 1e-4) << "a quarter of the speed: a fifth of the bytes";
  }
}

TEST(Plan, AsManyExchangesAcrossHostsAsRanksOnAHost) {
  const Plan plan(make_cluster(std::vector(8, 4), {{1e9, 0.0}}), options_for({}, 1 << 20));
  ASSERT_EQ(plan.steps().size(), 4U);
  EXPECT_EQ(plan.steps()[0].phase, Phase::kReduceScatter);
  EXPECT_EQ(plan.steps()[1].groups.size(), 4U);
  EXPECT_EQ(plan.steps()[2].phase, Phase::kAllGather);
  EXPECT_EQ(plan.steps()[3].dimension, 0);
  const Traffic traffic = total_traffic(plan);
  for (const RankTraffic& rank : traffic.ranks()) EXPECT_EQ(rank.sent, (1U << 18) * 4 * 7 / 4);
}

TEST(Plan, OneRankPerHostAndNothingToReduceNeedNoSteps) {
  EXPECT_TRUE(Plan(make_cluster(std::vector{1}, {}), options_for({}, 100)).steps().empty());
  EXPECT_TRUE(Plan(make_cluster(std::vector{2, 2}, {{1e9, 0.0}}), options_for({}, 0)).steps().empty());
  EXPECT_EQ(Plan(make_cluster(std::vector{1, 1}, {{1e9, 0.0}}), options_for({}, 9)).steps().size(), 2U);
}

// Half of what a host sends in a dimension of rings goes each way.
TEST(Plan, RingsGoBothWaysAtOnce) {
  for (const char* const mode : {"1x4r", "2x4r", "3x3r", "1x4rx3r", "2x4px3r", "1x3px4r", "2x5rx3r"}) {
    const Cluster cluster = cluster_of(parse_mode(mode));
    const Plan plan(cluster, options_for(parse_mode(mode), 720'000, Order::kAny));
    const std::vector<int> host_of = cluster.host_of_rank();
    for (const Step& step : plan.steps()) {
      if (step.algorithm != Algorithm::kRing) continue;
      std::map<int, std::array<std::size_t, 2>> sent;  // by host
      for (const Group& group : step.groups)
        for (const int rank : group.ranks)
          sent[host_of[static_cast<std::size_t>(rank)]][group.backward ? 1 : 0] += group.range.size();
      for (const auto& [host, ways] : sent)
        EXPECT_NEAR(static_cast<double>(ways[0]), static_cast<double>(ways[1]), 0.01 * 720'000)
            << mode << ", host " << host;
    }
  }
}

TEST(Plan, RefusesRingsWhereTheOrderMatters) {
  const Cluster cluster = make_cluster(std::vector{2, 2, 2}, {{1e9, 0.0}});
  expect_usage([&] { Plan(cluster, options_for(parse_mode("2x3r"), 100)); }, "a ring of 3 ranks");
}

}  // namespace
}  // namespace multiring
