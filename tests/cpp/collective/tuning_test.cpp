// What a tuning says, how plans follow it, and which schedules are kept.

#include "collective/plan/tuning.h"

#include <memory>
#include <vector>

#include "collective/plan/plan_cache.h"
#include "support/errors.h"
#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

GroupOptions two_by_two(std::size_t staging_bytes = 4096) {
  return {TransportKind::kCluster, 4, staging_bytes};
}

/// What this rank sends to other hosts in an allreduce of `count` float32: by plans, and in rounds.
struct Traffic {
  Sent plans;
  Sent rounds;
};
Traffic traffic_of(const RankGroup& group, Communicator& communicator, int world_rank, std::size_t count) {
  std::vector<float> data(count, 1.0F);
  const SentCounters& sent = group.sent(world_rank);
  const Traffic before{sent.plans.read(), sent.rounds.read()};
  run(communicator, allreduce_of(DType::kFloat32, count, data.data(), data.data(), "x"));
  EXPECT_EQ(data.back(), static_cast<float>(communicator.size()));
  return {sent.plans.read() - before.plans, sent.rounds.read() - before.rounds};
}

// RankGroup puts ranks 0 and 3 on one host, 1 and 2 on the other.
bool is_first_of_host(int rank) { return rank < 2; }

TEST(Tuning, IsRead) {
  const Tuning tuning = Tuning::parse("4x2:16=rounds,1024=2tx4d,4096=auto/512");
  EXPECT_EQ(tuning.layout(), "4x2");
  ASSERT_EQ(tuning.classes().size(), 3u);
  EXPECT_TRUE(tuning.algorithm(1)->staged);
  EXPECT_TRUE(tuning.algorithm(16)->staged);
  EXPECT_EQ(format_mode(tuning.algorithm(17)->mode), "2tx4d");
  EXPECT_EQ(tuning.algorithm(1024)->segment, 0u);
  EXPECT_TRUE(tuning.algorithm(1025)->mode.empty());
  EXPECT_FALSE(tuning.algorithm(4096)->staged);
  EXPECT_EQ(tuning.algorithm(1 << 30),
            &tuning.classes().back().algorithm);  // what is larger goes as the last
  EXPECT_EQ(tuning.algorithm(1 << 30)->segment, 512u);
  EXPECT_EQ(Tuning().algorithm(1), nullptr);
}

TEST(Tuning, WhatIsWrongIsTold) {
  const auto expect_refused = [](const char* text, const char* told) {
    expect_usage([&] { Tuning::parse(text); }, told);
  };
  expect_refused("", "'' names no hosts");
  expect_refused(":1=auto", "'' names no hosts");
  expect_refused("2x2:", "'' names no algorithm");
  expect_refused("2x2:1=auto,", "'' names no algorithm");
  expect_refused("2x2:0=auto", "'0' is not a number of bytes");
  expect_refused("2x2:1K=auto", "'1K' is not a number of bytes");
  expect_refused("2x2:1=auto/", "'' is not a number of bytes");
  expect_refused("2x2:1=rounds/4", "'rounds/4' gives rounds a segment size");
  expect_refused("2x2:8=auto,8=rounds", "'8=rounds' is not for larger sizes");
  expect_refused("2x2:8=2z", "mode '2z'");
}

TEST(Tuning, PlansFollowItWhereItFits) {
  RankGroup group(two_by_two());
  group.run_transports([](const std::shared_ptr<Transport>& transport) {
    PlanCache plans;
    EXPECT_EQ(plans.algorithm(1, false), nullptr);
    plans.set_tuning(Tuning::parse("2x2:16=rounds,99=2x2d"), *transport);
    EXPECT_TRUE(plans.algorithm(1, false)->staged);
    EXPECT_EQ(format_mode(plans.algorithm(17, false)->mode), "2x2d");
    EXPECT_EQ(plans.algorithm(17, true), nullptr) << "bits of what is rounded may not depend on size";
    for (const char* const other : {"4x2:16=rounds", "2+2:16=rounds", "1x4:16=4t"}) {
      plans.set_tuning(Tuning::parse(other), *transport);
      EXPECT_EQ(plans.algorithm(1, false), nullptr) << other;
    }
    for (const char* const wrong : {"2x2:16=2x3", "2x2:16=4x1", "2x2:16=rounds,17=2dx2"})
      expect_usage([&] { plans.set_tuning(Tuning::parse(wrong), *transport); }, "");
    plans.force_mode(parse_mode("2x2t"), *transport);
    plans.set_tuning(Tuning::parse("2x2:16=rounds"), *transport);
    for (const bool rounded : {false, true})
      EXPECT_EQ(format_mode(plans.algorithm(1, rounded)->mode), "2x2t");
  });
}

TEST(Tuning, MayChangeBetweenOperations) {
  RankGroup group(two_by_two());
  const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, 20001, 4);
  group.run([&](Communicator& communicator) {
    for (const char* const tuning : {"2x2:1=rounds", "2x2:1=2tx2d", "", "2x2:1=auto/64"}) {
      communicator.set_tuning(tuning);
      SCOPED_TRACE(tuning);
      expect_reduced(communicator, problem);
    }
    expect_usage([&] { communicator.set_tuning("2x2:1=9x9"); }, "");
    expect_usage([&] { communicator.set_tuning("2x2:1=rounds,2=9x9"); }, "");
  });
}

// Bits are those of the canonical order by whichever algorithm; so what crosses the network has to tell the
// algorithm.
constexpr std::size_t kCount = 20001;
constexpr std::size_t kBytes = kCount * sizeof(float);

TEST(Tuning, WhatIsFollowedDecidesOnTheMessages) {
  RankGroup group(two_by_two(64 * 1024));
  group.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const auto traffic = [&](const char* tuning) {
      communicator.set_tuning(tuning);
      return traffic_of(group, communicator, rank, kCount);
    };
    const Traffic usual = traffic("");
    EXPECT_GT(usual.plans.messages, 0u) << "everybody exchanges a share";
    const Traffic rounds = traffic("2x2:1=rounds");
    EXPECT_EQ(rounds.plans.messages, 0u);
    EXPECT_GE(rounds.rounds.bytes, usual.rounds.bytes + kBytes);
    const Traffic doubling = traffic("2x2:1=2tx2d");
    EXPECT_EQ(doubling.plans.messages > 0, is_first_of_host(rank));
    EXPECT_EQ(doubling.plans.bytes, is_first_of_host(rank) ? 2 * kBytes : 0) << "two sums of each host";
    const Traffic ten = traffic("2x2:1=auto/8192");
    const Traffic five = traffic("2x2:1=auto/16384");
    EXPECT_EQ(ten.plans.messages, 2 * five.plans.messages);
    EXPECT_NE(ten.plans.messages, usual.plans.messages);
    const Traffic again = traffic("");
    EXPECT_EQ(again.plans.messages, usual.plans.messages);
  });
}

TEST(Tuning, EveryClassOfSizesGoesItsWay) {
  GroupOptions options = two_by_two(64 * 1024);
  options.communicator.tuning = "2x2:64=2tx2d,40000=rounds,100000=auto/8192,200000=2tx2t";
  RankGroup group(options);
  group.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const auto plans = [&](std::size_t count) {
      return traffic_of(group, communicator, rank, count).plans.messages;
    };
    EXPECT_EQ(plans(16), is_first_of_host(rank) ? 1u : 0u);
    EXPECT_EQ(plans(17), 0u);
    EXPECT_EQ(plans(10000), 0u);
    const std::size_t six_segments = plans(6 * 8192 / sizeof(float));
    EXPECT_GT(six_segments, 0u);
    EXPECT_EQ(plans(12 * 8192 / sizeof(float)), 2 * six_segments);
    EXPECT_EQ(plans(60000) > 0, is_first_of_host(rank)) << "what is larger than all goes as the last";
  });
}

TEST(Tuning, HoldsForTheSameRanksAndNotForGroups) {
  GroupOptions options = two_by_two();
  options.communicator.tuning = "2x2:1=2x2d";
  options.communicator.mode = "2tx2d";
  RankGroup group(options);
  group.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const auto same = communicator.duplicate("queue", {});
    EXPECT_EQ(same->options().tuning, "2x2:1=2x2d");
    EXPECT_EQ(same->options().mode, "2tx2d");
    const auto all = communicator.split(0, 0, {});  // as gradients are reduced by
    EXPECT_EQ(all->options().tuning, "2x2:1=2x2d");
    EXPECT_EQ(all->options().mode, "2tx2d");
    for (const auto& each : {same, all})
      EXPECT_EQ(traffic_of(group, *each, rank, kCount).plans.messages > 0, is_first_of_host(rank));
    for (const auto& others : {communicator.split(0, -communicator.rank(), {}),
                               communicator.split(communicator.rank() % 2, 0, {})}) {
      EXPECT_EQ(others->options().tuning, "");
      EXPECT_EQ(others->options().mode, "");
      const bool planned = others->size() == 4;  // two use exchanges
      EXPECT_EQ(traffic_of(group, *others, rank, kCount).plans.messages > 0, planned);
    }
  });
}

TEST(Schedules, TheOneUnusedForLongestIsDropped) {
  RankGroup group(two_by_two());
  group.run_transports([](const std::shared_ptr<Transport>& transport) {
    PlanCache plans;
    const auto schedule = [&](std::size_t count, const Mode& mode = {}) {
      return plans.schedule(*transport, {.count = count, .mode = mode});
    };
    const auto first = schedule(1);
    const std::weak_ptr<const RankSchedule> second = schedule(2);
    const std::weak_ptr<const RankSchedule> third = schedule(3);
    for (std::size_t count = 4; count <= PlanCache::kMaxSchedules; ++count) schedule(count);
    EXPECT_EQ(schedule(1), first);
    EXPECT_FALSE(second.expired());
    schedule(PlanCache::kMaxSchedules + 1);
    EXPECT_TRUE(second.expired());
    EXPECT_FALSE(third.expired());
    EXPECT_EQ(schedule(1), first);
    EXPECT_NE(schedule(1, parse_mode("2x2d")), first) << "another mode has another schedule";
    EXPECT_TRUE(third.expired());
  });
}

}  // namespace
}  // namespace multiring
