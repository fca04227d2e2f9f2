#include "topology/cost_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "topology/traffic.h"

namespace multiring {
namespace {

constexpr double kGigabit = 125e6;  // bytes per second

/// So fast that it does not count.
constexpr HostMemory kFreeMemory{1e18, 0.0};

CostModel network_only() {
  CostModel model;
  model.message_seconds = model.interface_message_seconds = 0.0;
  model.reduction_bytes_per_second = 1e18;
  return model;
}

Cluster gigabit(int hosts, int ranks, double latency = 0.0) {
  const std::vector<int> layout(static_cast<std::size_t>(hosts), ranks);
  return make_cluster(layout, {{kGigabit, latency}}, kFreeMemory);
}

PlanOptions options_for(const char* mode, std::size_t count) {
  PlanOptions options;
  if (*mode != '\0') options.mode = parse_mode(mode);
  options.count = count;
  return options;
}

double seconds_of(const Cluster& cluster, const char* mode, std::size_t count,
                  Order order = Order::kCanonical) {
  PlanOptions options = options_for(mode, count);
  options.order = order;
  return predict(Plan(cluster, options), network_only());
}

TEST(CostModel, LargeMessagesCostTheBytesThatTheInterfaceSends) {
  constexpr std::size_t kCount = 4U * 8U * 16U * 1000U;
  const double wire = 2.0 * 7.0 / 8.0 * kCount * sizeof(float) / kGigabit;
  EXPECT_NEAR(seconds_of(gigabit(8, 4), "4px8p", kCount), wire, 1e-9);
  EXPECT_NEAR(seconds_of(gigabit(8, 4), "4px8r", kCount, Order::kAny), wire, 1e-9);
  EXPECT_NEAR(seconds_of(gigabit(8, 4), "4px2px4p", kCount), wire, 1e-9) << "in whatever dimensions";
  EXPECT_NEAR(seconds_of(gigabit(8, 4), "4tx8d", kCount), 3.0 * kCount * sizeof(float) / kGigabit, 1e-9);
}

TEST(CostModel, SmallMessagesCostTheRounds) {
  constexpr double kLatency = 1e-3;
  const Cluster cluster = gigabit(8, 2, kLatency);
  constexpr double kSlack = 1e-4;
  EXPECT_NEAR(seconds_of(cluster, "2px8p", 100), 2 * kLatency, kSlack);
  EXPECT_NEAR(seconds_of(cluster, "2px8r", 100, Order::kAny), 14 * kLatency, kSlack);
  EXPECT_NEAR(seconds_of(cluster, "2tx8d", 100), 3 * kLatency, kSlack);
  EXPECT_NEAR(seconds_of(cluster, "2tx8t", 100), 6 * kLatency, kSlack);
  EXPECT_NEAR(seconds_of(gigabit(7, 2, kLatency), "2tx7d", 100), 4 * kLatency, kSlack) << "one in, one out";
}

TEST(CostModel, ManyMessagesCostTheProcessor) {
  CostModel model = network_only();
  model.message_seconds = 1e-3;
  const Plan plan(gigabit(64, 1), options_for("1x64p", 64));
  EXPECT_NEAR(predict(plan, model), 4e-3 + 63e-3, 1e-4) << "to four owners, from each of them to all";
  EXPECT_NEAR(predict(Plan(gigabit(64, 1), options_for("1x64d", 64)), model), 6e-3, 1e-4);
}

TEST(CostModel, MemoryCostsWhatIsReadAndWritten) {
  CostModel model = network_only();
  const Cluster cluster = make_cluster(std::vector{4}, {}, {1e9, 0.0});
  const Plan plan(cluster, options_for("4p", 1 << 20));
  EXPECT_NEAR(predict(plan, model), 2.0 * 4 * (4 << 20) / 1e9, 1e-6) << "read once and written once by each";
  EXPECT_NEAR(limit_seconds(plan, model), predict(plan, model), 1e-6);
  model.reduction_bytes_per_second = 0.1e9;
  EXPECT_NEAR(predict(plan, model), 2.0 * (4 << 20) / 0.1e9, 1e-3) << "each rank moves a quarter";
}

TEST(CostModel, SegmentsHideTheShorterResource) {
  const Cluster cluster = make_cluster(std::vector(4, 4), {{kGigabit, 0.0}}, {0.5e9, 0.0});
  CostModel model = network_only();
  const Plan plan(cluster, options_for("4px4p", 1 << 22));
  const PlanCost cost = predict_steps(plan, model);
  double network = 0.0;
  double memory = 0.0;
  for (const StepCost& step : cost.steps) {
    network += step.wire;
    memory += step.memory;
  }
  EXPECT_NEAR(cost.seconds(1), network + memory, 1e-9);
  EXPECT_NEAR(cost.seconds(1000), std::max(network, memory), 0.01 * (network + memory));
  model.message_seconds = 1e-3;
  EXPECT_GT(predict_steps(plan, model).seconds(100000), network + memory) << "every piece is a message";
}

TEST(CostModel, ADimensionMayHaveALinkOfItsOwn) {
  CostModel model = network_only();
  model.dimensions = {{1e-6, kGigabit}, {1e-3, kGigabit / 10}};
  const std::size_t count = 1 << 20;
  const Plan plan(gigabit(8, 1), options_for("1x4px2p", count));
  const double bytes = count * sizeof(float);
  const double near = 2.0 * 3.0 / 4.0 * bytes / kGigabit;
  const double far = bytes / 4.0 / (kGigabit / 10);
  EXPECT_NEAR(predict(plan, model), near + far + 2e-6 + 2e-3, 1e-6);
  EXPECT_NEAR(limit_seconds(plan, model), std::max(far, 2.0 * 7.0 / 8.0 * bytes / kGigabit), 1e-9);
}

TEST(CostModel, NoPlanIsBelowTheLimit) {
  for (const int hosts : {1, 2, 3, 8})
    for (const int ranks : {1, 2, 3, 4})
      for (const std::size_t count : {1UL, 1000UL, 10000000UL})
        for (const Order order : {Order::kCanonical, Order::kAny}) {
          const std::vector<int> layout(static_cast<std::size_t>(hosts), ranks);
          const Cluster cluster = make_cluster(layout, {{kGigabit, 1e-5}, {kGigabit / 4, 1e-5}});
          for (const Collective collective : {Collective::kAllreduce, Collective::kReduceScatter,
                                              Collective::kAllgather, Collective::kBroadcast}) {
            PlanOptions options = collective_options(collective, count, cluster.size());
            options.order = order;
            const Plan plan = choose_plan(cluster, options, {});
            EXPECT_LE(limit_seconds(plan, {}), predict(plan, {}) * (1.0 + 1e-3))
                << collective_name(collective) << " " << hosts << "x" << ranks << ", " << count;
          }
        }
}

TEST(ChoosePlan, TakesFewRoundsForSmallAndFewBytesForLargeMessages) {
  const Cluster cluster = make_cluster(std::vector(64, 4), {{10 * kGigabit, 20e-6}});
  const Plan small = choose_plan(cluster, options_for("", 1000), {});
  EXPECT_EQ(format_mode(small.mode()), "4tx64d") << "over one rank of each host";
  EXPECT_EQ(small.segments(), 1U);
  const Plan large = choose_plan(cluster, options_for("", 25 << 20), {});
  EXPECT_EQ(format_mode(large.mode()), "4px64p");
  EXPECT_GT(large.segments(), 1U);
  EXPECT_LT(limit_seconds(large, {}), predict(large, {}));
  EXPECT_GT(limit_seconds(large, {}), 0.8 * predict(large, {}));
}

TEST(ChoosePlan, NothingElseIsClearlyFaster) {
  const Cluster cluster = make_cluster(std::vector(6, 2), {{kGigabit, 50e-6}, {kGigabit / 4, 50e-6}});
  for (std::size_t count = 1; count < (1U << 26); count *= 8) {
    const double chosen = predict(choose_plan(cluster, options_for("", count), {}), {});
    for (const char* const mode : {"2px6p", "2tx6d", "2tx6t", "2px6d", "2tx6p", "2px6t"})
      for (const int channels : {1, 2})
        for (const std::size_t segment : {0UL, 4096UL, 65536UL, 1048576UL}) {
          PlanOptions options = options_for(mode, count);
          options.channels = channels;
          options.segment = segment;
          EXPECT_LE(chosen, predict(Plan(cluster, options), {}) * 1.02) << mode << " " << count;
        }
  }
}

TEST(ChoosePlan, KeepsWhatIsForced) {
  const Cluster cluster = make_cluster(std::vector(8, 4), {{kGigabit, 50e-6}});
  EXPECT_EQ(format_mode(choose_plan(cluster, options_for("4tx4x2t", 1 << 22), {}).mode()), "4tx4px2t");
  PlanOptions options = options_for("4x8r", 1 << 22);
  EXPECT_THROW(choose_plan(cluster, options, {}), Error);
  options.order = Order::kAny;
  options.segment = 999;
  EXPECT_EQ(format_mode(choose_plan(cluster, options, {}).mode()), "4px8r");
  EXPECT_EQ(choose_plan(cluster, options, {}).segment(), 999U);
  EXPECT_THROW(choose_plan(cluster, options_for("4x9", 1), {}), Error);
}

TEST(ChoosePlan, DividesAThousandRanksInTime) {
  const Cluster cluster = make_cluster(std::vector(256, 4), {{10 * kGigabit, 20e-6}});
  const Plan plan = choose_plan(cluster, options_for("", 25 << 20), {});
  EXPECT_GT(predict(plan, {}), limit_seconds(plan, {}));
  EXPECT_EQ(plan.parts_across_hosts(), 1U);
}

TEST(ChoosePlan, HasAnEndForManyDimensions) {
  const Cluster cluster = make_cluster(std::vector(512, 2), {{10 * kGigabit, 20e-6}});
  PlanOptions options = options_for("2x2x2x2x2x2x2x2x2x2", 1 << 20);
  options.order = Order::kAny;
  EXPECT_EQ(choose_plan(cluster, options, {}).mode().size(), 10U);
  const Plan mixed = choose_plan(cluster, options_for("2x1x4tx16x8", 1 << 20), {});
  EXPECT_EQ(mixed.mode()[2].algorithm, Algorithm::kTree);
  EXPECT_EQ(mixed.mode()[1].algorithm, Algorithm::kPairwise);
}

TEST(CostModel, RefusesSpeedsThatAreNone) {
  const Plan plan(gigabit(2, 1), options_for("", 10));
  CostModel model;
  model.reduction_bytes_per_second = 0.0;
  EXPECT_THROW(predict(plan, model), Error);
  model = {};
  model.dimensions = {{0.0, -1.0}};
  EXPECT_THROW(predict(plan, model), Error);
}

}  // namespace
}  // namespace multiring
