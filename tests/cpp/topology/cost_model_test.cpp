#include "topology/cost_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
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

/// Seconds in which whole chunks pass.
double predict(const Plan& plan, const CostModel& model) { return predict_steps(plan, model).seconds(1); }

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

TEST(CostModel, ABurstPassesAtOnce) {
  CostModel bursty = network_only();
  bursty.burst_bytes = 256e3;
  const auto seconds = [&](std::size_t bytes, const CostModel& model) {
    return predict(Plan(gigabit(2, 1), options_for("1px2p", bytes / sizeof(float))), model);
  };
  constexpr std::size_t kFew = 64'000;
  constexpr std::size_t kMany = 64'000'000;
  EXPECT_LT(seconds(kFew, bursty), 0.01 * seconds(kFew, network_only()));
  EXPECT_NEAR(seconds(kMany, bursty), seconds(kMany, network_only()) - 256e3 / kGigabit, 2e-5);
  double before = 0.0;
  for (const double bytes : {1.0, 1e3, 1e5, 2.56e5, 1e6, 1e9, 1e18}) {
    const double part = bursty.beyond_burst(bytes);
    EXPECT_GE(part, before) << bytes;
    EXPECT_LE(part, 1.0) << bytes;
    before = part;
  }
  bursty.burst_bytes = 1e300;
  EXPECT_EQ(bursty.beyond_burst(1.0), 0.0);
  bursty.burst_bytes = 0.0;
  EXPECT_EQ(bursty.beyond_burst(5.0), 1.0);
  EXPECT_EQ(bursty.beyond_burst(0.0), 1.0);
}

TEST(CostModel, EachLinkLetsOneBurstPassInAllSteps) {
  CostModel bursty = network_only();
  bursty.burst_bytes = 256e3;
  const auto part = [&](const Cluster& cluster, const char* mode) {
    const Plan plan(cluster, options_for(mode, 200'000 / sizeof(float)));
    return predict(plan, bursty) / predict(plan, network_only());
  };
  // Of a tree of two hosts each link passes the array once in each direction.
  EXPECT_NEAR(part(gigabit(2, 1), "1px2t"), bursty.beyond_burst(200e3), 1e-3);
  // In halves the first host of four sends it twice.
  EXPECT_NEAR(part(gigabit(4, 1), "1px4t"), bursty.beyond_burst(400e3), 1e-3);
}

TEST(CostModel, WhatSeveralSendToOneMayBeLost) {
  CostModel lossy = network_only();
  lossy.queue_bytes = 64e3;
  lossy.loss_seconds = 0.1;
  const auto lost = [&](const char* mode, std::size_t bytes, std::size_t pieces = 1) {
    PlanOptions options = options_for(mode, bytes / sizeof(float));
    options.order = Order::kAny;
    const Plan plan(gigabit(8, 1), options);
    return lossy.held_up(queue_of(load_of(plan), pieces)) / lossy.loss_seconds;
  };
  // Of seven that send an eighth each.
  EXPECT_NEAR(lost("1px8p", 72'000), 0.0, 1e-9);
  EXPECT_NEAR(lost("1px8p", 80'000), 1.0, 1e-9);
  // Of a ring in both directions two that send a sixteenth.
  EXPECT_NEAR(lost("1px8r", 400'000), 0.0, 1e-9);
  EXPECT_NEAR(lost("1px8r", 800'000), 1.0, 1e-9);
  // All of one, or half of it.
  EXPECT_NEAR(lost("1px8d", 64'000), 0.0, 1e-9);
  EXPECT_NEAR(lost("1px8d", 72'000), 1.0, 1e-9);
  EXPECT_NEAR(lost("1px2px2px2p", 127'000), 0.0, 1e-9);
  EXPECT_NEAR(lost("1px2px2px2p", 136'000), 1.0, 1e-9);
  EXPECT_NEAR(lost("1px2px2px2p", 1'048'576, 4), 1.0, 1e-9) << "pieces are in several dimensions";
  EXPECT_NEAR(lost("1px2px2px2p", 1'048'576, 64), 0.0, 1e-9) << "of short pieces";
  EXPECT_NEAR(lost("1px8p", 64'000'000, 8), 2.0, 1e-9) << "of four at a time";
}

TEST(PlanLoad, PiecesThatAreInSeveralHopsWaitForAHostTogether) {
  const auto queued = [](const char* mode, std::size_t bytes, std::size_t pieces) {
    return queue_of(load_of(Plan(gigabit(8, 1), options_for(mode, bytes / sizeof(float)))), pieces).bytes;
  };
  // Of seven, in both hops; of two pieces none is in the second hop before both are in the first.
  EXPECT_NEAR(queued("1px8p", 8192, 1), 7168.0, 1e-9);
  EXPECT_NEAR(queued("1px8p", 8192, 2), 7168.0, 1e-9);
  EXPECT_NEAR(queued("1px8p", 8192, 64), 2.0 * 2.0 * 7168.0 / 64.0, 1e-9) << "two in each hop";
  // Halves, quarters and eighths, there and back.
  EXPECT_NEAR(queued("1px2px2px2p", 8192, 1), 4096.0, 1e-9);
  EXPECT_NEAR(queued("1px2px2px2p", 8192, 2), 4096.0, 1e-9) << "both in halves";
  EXPECT_NEAR(queued("1px2px2px2p", 8192, 4), 3072.0, 1e-9) << "two in halves, two in quarters";
  EXPECT_NEAR(queued("1px2px2px2p", 8192, 64), 2.0 * 2.0 * 7168.0 / 64.0, 1e-9);
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

TEST(CostModel, ARankSendsAndAddsWithOneProcessor) {
  const Cluster cluster = make_cluster(std::vector(4, 1), {{1e18, 0.0}}, kFreeMemory);
  CostModel model = network_only();
  model.message_seconds = 1e-3;
  model.reduction_bytes_per_second = 1e9;
  constexpr std::size_t kPieces = 1000;
  const PlanCost cost = predict_steps(Plan(cluster, options_for("1px4p", 1 << 22)), model);
  double processor = 0.0;
  for (const StepCost& step : cost.steps) processor += kPieces * step.messages + step.memory;
  EXPECT_NEAR(cost.seconds(kPieces), processor, 0.01 * processor);
}

TEST(CostModel, ShortPiecesWaitForEachOther) {
  constexpr double kLatency = 1e-3;
  const PlanCost cost = predict_steps(Plan(gigabit(4, 1, kLatency), options_for("1px4p", 4)), network_only());
  EXPECT_NEAR(cost.seconds(101) - cost.seconds(1), 100 * kLatency / 2, 1e-5) << "two are in a hop";
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
            for (const PlanOptions& each : plan_options(cluster, options, count * sizeof(float), {})) {
              const Plan plan(cluster, each);
              EXPECT_LE(limit_seconds(plan, {}), predict(plan, {}) * (1.0 + 1e-3))
                  << collective_name(collective) << " " << hosts << "x" << ranks << ", " << count << ", "
                  << format_mode(each.mode);
            }
          }
        }
}

TEST(PlanOptions, HaveAnEndForManyDimensions) {
  const Cluster cluster = make_cluster(std::vector(512, 2), {{10 * kGigabit, 20e-6}});
  PlanOptions options = options_for("2x2x2x2x2x2x2x2x2x2", 1 << 20);
  options.order = Order::kAny;
  EXPECT_LT(plan_options(cluster, options, 1 << 20, {}).size(), 50U);
  const std::vector<PlanOptions> mixed =
      plan_options(cluster, options_for("2x1x4tx16x8", 1 << 20), 1 << 20, {});
  ASSERT_FALSE(mixed.empty());
  for (const PlanOptions& each : mixed) {
    EXPECT_EQ(each.mode[2].algorithm, Algorithm::kTree) << "as forced";
    EXPECT_EQ(each.mode[1].algorithm, Algorithm::kPairwise) << "alone";
  }
}

/// The dimensions in which `bytes` cross hosts, at a message for each rank and other ones of a host.
std::string divided(const std::vector<int>& ranks, std::size_t bytes, double message_seconds = 5e-6,
                    double burst_bytes = 0.0) {
  CostModel model;
  model.burst_bytes = burst_bytes;
  model.message_seconds = message_seconds;
  std::string text;
  for (const Mode& mode : divided_modes(make_cluster(ranks, {{10 * kGigabit, 20e-6}}), bytes, model))
    text += (text.empty() ? "" : " ") + format_mode(mode);
  return text;
}

TEST(DividedModes, FollowFromWhatMessagesCost) {
  const auto hosts = [](int count, int ranks = 1) {
    return std::vector<int>(static_cast<std::size_t>(count), ranks);
  };
  EXPECT_EQ(divided(hosts(4), 1024), "") << "a hop takes longer than the messages that it saves";
  EXPECT_EQ(divided(hosts(4), 1024, 50e-6), "1x2x2");
  EXPECT_EQ(divided(hosts(16), 1024), "1x4x4");
  EXPECT_EQ(divided(hosts(16), 4 << 20), "") << "the bytes decide, and they are the same";
  EXPECT_EQ(divided(hosts(16), 4 << 20, 5e-6, 64e6), "1x4x4") << "they pass at once";
  EXPECT_EQ(divided(hosts(64), 1024), "1x8x8 1x4x4x4");
  EXPECT_EQ(divided(hosts(64), 512 << 10), "1x8x8 1x4x4x4");
  EXPECT_EQ(divided(hosts(37, 4), 1024), "") << "no sizes to divide them by";
  EXPECT_EQ(divided(hosts(20, 4), 128 << 10), "4x4x5") << "five hosts first would be no node of the tree";
  std::vector<int> uneven = hosts(64, 4);
  uneven[63] = 1;
  EXPECT_EQ(divided(uneven, 1024), "4x8x8 4x4x4x4");
  EXPECT_EQ(divided({4}, 1024), "");
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
