// What a tuning says, how plans follow it, and which schedules are kept.

#include "collective/plan/tuning.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "collective/kinds.h"
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
  const WatchedNetworks& sent = group.sent(world_rank);
  const Traffic before{sent.plans.read(), sent.rounds.read()};
  run(communicator, allreduce_of(DType::kFloat32, count, data.data(), data.data(), "x"));
  EXPECT_EQ(data.back(), static_cast<float>(communicator.size()));
  return {sent.plans.read() - before.plans, sent.rounds.read() - before.rounds};
}

// RankGroup puts ranks 0 and 3 on one host, 1 and 2 on the other.
bool is_first_of_host(int rank) { return rank < 2; }

TEST(Tuning, TheFirstRuleThatMatchesWins) {
  const Tuning tuning = Tuning::parse(
      "# what a user knows\n"
      "0-16 rounds  # both ends count\n"
      "\n"
      "16-1K\t2tx4d\r\n"
      "8K- 2px4p/64K\n"
      "0-4095 2px4t\n"
      "reduce_scatter 0- allreduce:2px2d");
  ASSERT_EQ(tuning.rules().size(), 5u);
  EXPECT_TRUE(tuning.rule(Collective::kReduceScatter, 0)->kind == CrossingAlgorithm::Kind::kAllreducePlan);
  EXPECT_EQ(tuning.rule(Collective::kAllgather, 0), nullptr);
  EXPECT_TRUE(tuning.rule(Collective::kAllreduce, 0)->is_rounds());
  EXPECT_TRUE(tuning.rule(Collective::kAllreduce, 16)->is_rounds());
  EXPECT_EQ(format_mode(tuning.rule(Collective::kAllreduce, 17)->mode), "2tx4d");
  EXPECT_EQ(tuning.rule(Collective::kAllreduce, 1024)->segment, 0u);
  EXPECT_EQ(format_mode(tuning.rule(Collective::kAllreduce, 1025)->mode), "2px4t");
  EXPECT_EQ(tuning.rule(Collective::kAllreduce, 4096), nullptr);
  EXPECT_EQ(tuning.rule(Collective::kAllreduce, std::size_t{1} << 40)->segment, 65536u);
  EXPECT_EQ(tuning.rules().back().line, 7u);
  EXPECT_FALSE(tuning.costs());
  EXPECT_EQ(Tuning().rule(Collective::kAllreduce, 1), nullptr);
}

TEST(Tuning, CostsAreReadToTheSameBits) {
  JobCosts costs;
  double number = 1.0 / 3.0;
  visit_costs([&](const char*, double JobCosts::* cost) { costs.*cost = number /= 7.0; });
  const Tuning tuning = Tuning::parse("1- rounds\ncosts " + format_costs(costs));
  ASSERT_TRUE(tuning.costs());
  visit_costs([&](const char* name, double JobCosts::* cost) {
    EXPECT_EQ((*tuning.costs()).*cost, costs.*cost) << name;
  });
  EXPECT_EQ(tuning.costs_text(), "costs " + format_costs(costs));
  EXPECT_EQ(parse_costs("latency=1e-3").bytes_per_second, JobCosts().bytes_per_second);
}

TEST(Tuning, TheLineThatIsWrongIsNamed) {
  const auto expect_refused = [](const std::string& line, const char* told) {
    expect_usage([&] { Tuning::parse("0- rounds\n" + line); }, "line 2 of the tuning, '" + line + "'");
    expect_usage([&] { Tuning::parse(line); }, told);
  };
  expect_refused("{", "neither costs nor a rule");
  expect_refused("16K", "neither costs nor a rule");
  expect_refused("0-16K", "neither costs nor a rule");
  expect_refused("-16K rounds", "'' is not a number of bytes");
  expect_refused("0-16k rounds", "'16k' is not a number of bytes");
  expect_refused("0-16KiB rounds", "'16KiB' is not a number of bytes");
  expect_refused("0-99999999999999999999 rounds", "is not a number of bytes");
  expect_refused("0-9999999999999G rounds", "is not a number of bytes");
  expect_refused("2-1 rounds", "'2-1' ends before it begins");
  expect_refused("0- rounds/4", "'rounds/4' gives rounds a segment");
  expect_refused("0- messages/4", "'messages/4' gives messages a segment");
  expect_refused("0- 2x2/0", "has a segment of no bytes");
  expect_refused("0- auto", "mode 'auto'");
  expect_refused("0- auto", "or in a rule for gather, scatter or alltoall messages");
  expect_refused("0- 2x2d rounds", "mode '2x2d rounds'");
  expect_refused("reduce_scatter 0- 2x2d", "mode 2x2d is for allreduces");
  expect_refused("allgather 0- 2tx2", "mode 2tx2 is for allreduces");
  expect_refused("broadcast 0- 2x2x2", "mode 2x2x2 is for allreduces");
  expect_refused("costs latency", "latency is '', not a number of 0 or more");
  expect_refused("costs latency=-1", "latency is '-1', not a number of 0 or more");
  expect_refused("costs latency=nan", "latency is 'nan', not a number of 0 or more");
  expect_refused("costs bytes_per_second=0", "bytes_per_second is '0', not a number above 0");
  expect_refused("costs speed=1", "there is no cost 'speed'");
  expect_refused("costs latency=inf", "latency is 'inf'");
  expect_refused("costs bytes_per_second=inf", "bytes_per_second is 'inf'");
  expect_refused("costs memory_bytes_per_second=inf", "memory_bytes_per_second is 'inf'");
  expect_refused("costs latency=1 latency=2", "it has two costs 'latency'");
  expect_refused("costs", "it names no cost");
  expect_refused("0- 1x2/18446744073709551615", "is not a number of bytes");
  EXPECT_EQ(Tuning::parse("costs latency=1\tmessage_seconds=2").costs()->message_seconds, 2.0);
  expect_usage([] { Tuning::parse("costs latency=1\ncosts latency=2"); }, "the costs are there already");
}

TEST(Tuning, WhatDoesNotFitTheRanksIsRefused) {
  RankGroup group(two_by_two(256 * 1024));
  group.run_transports([](const std::shared_ptr<Transport>& transport) {
    PlanCache plans;
    plans.set_tuning(Tuning::parse("0-16 rounds\n17-99 2x2d"), *transport);
    const auto algorithm = [&](std::size_t bytes, bool rounded = false) {
      return plans.algorithm(*transport, Collective::kAllreduce, bytes, Order::kCanonical, rounded);
    };
    EXPECT_TRUE(algorithm(1).is_rounds());
    EXPECT_EQ(format_mode(algorithm(17).mode), "2x2d");
    EXPECT_EQ(format_mode(algorithm(1 << 20).mode), "2px2p") << "by the table";
    EXPECT_TRUE(algorithm(17, true).is_rounds()) << "bits of what is rounded may not depend on size";
    EXPECT_EQ(format_mode(algorithm(1 << 20, true).mode), "2px2p");
    for (const char* const wrong : {"2x3", "4x1", "2dx2"}) {
      const auto set = [&] {
        plans.set_tuning(Tuning::parse("0- rounds\n0- " + std::string(wrong)), *transport);
      };
      expect_usage(set, "line 2 of the tuning: mode " + std::string(wrong));
    }
    for (const auto& [rule, told] : {std::pair{"allgather 0- 2x2d", "is for allreduces"},
                                     {"reduce_scatter 0- 2tx2", "is for allreduces"},
                                     {"0- allreduce:2px2d", "is for reduce_scatter only"},
                                     {"broadcast 0- messages", "is for gather, scatter and alltoall only"},
                                     {"gather 0- 2px2p", "gather has no plans such as 2px2p"},
                                     {"allgather 0- allreduce:2px2d", "is for reduce_scatter only"}})
      expect_usage([&] { plans.set_tuning(Tuning::parse(rule), *transport); }, told);
    plans.force(parse_algorithm("2x2t"), *transport);
    for (const bool rounded : {false, true}) EXPECT_EQ(format_mode(algorithm(1, rounded).mode), "2x2t");
    plans.force(parse_algorithm("rounds"), *transport);
    EXPECT_TRUE(algorithm(1 << 20).is_rounds());
  });
}

TEST(Tuning, RulesOfOtherRanksAreNotFollowed) {
  GroupOptions options = two_by_two();
  options.communicator.tuning = "0- rounds\n0- 4x2d\ncosts latency=1";
  std::atomic<int> warnings = 0;
  options.communicator.warn = [&](const std::string& text) {
    ++warnings;
    expect_text(text, "line 2 of the tuning: mode 4x2d is for 8 ranks");
  };
  RankGroup group(options);
  group.run([&](Communicator& communicator) {
    EXPECT_EQ(communicator.tuning(), Tuning::parse("costs latency=1").costs_text());
    expect_reduced(communicator, make_problem(DType::kFloat32, {ReduceOp::kSum}, 1000, 4));
  });
  EXPECT_EQ(warnings, 1) << "of rank 0";
}

TEST(Tuning, TheTableShowsWhatIsUsed) {
  GroupOptions options = two_by_two();
  options.communicator.tuning = "0-1K 2tx2d\n1K-2K rounds";
  RankGroup group(options);
  group.run([&](Communicator& communicator) {
    const auto used = [&](std::size_t bytes) {
      std::string names;
      for (const AlgorithmRow& row :
           communicator.algorithm_rows(Collective::kAllreduce, bytes, Order::kDefault))
        if (row.is_chosen) names += row.name;
      return names;
    };
    EXPECT_EQ(used(1024), "2tx2d");
    EXPECT_EQ(used(2048), "rounds");
    EXPECT_NE(used(1 << 20), "");
  });
}

TEST(Tuning, MayChangeBetweenOperations) {
  RankGroup group(two_by_two());
  const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, 20001, 4);
  group.run([&](Communicator& communicator) {
    for (const char* const tuning : {"0- rounds", "0- 2tx2d", "", "0- 2px2p/64", "costs latency=0"}) {
      communicator.set_tuning(tuning);
      SCOPED_TRACE(tuning);
      expect_reduced(communicator, problem);
    }
    expect_usage([&] { communicator.set_tuning("0- 9x9"); }, "");
    expect_usage([&] { communicator.set_tuning("0-1 rounds\n2- 9x9"); }, "");
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
    const Traffic rounds = traffic("0- rounds");
    EXPECT_EQ(rounds.plans.messages, 0u);
    EXPECT_GE(rounds.rounds.bytes, usual.rounds.bytes + kBytes);
    const Traffic doubling = traffic("0- 2tx2d");
    EXPECT_EQ(doubling.plans.messages > 0, is_first_of_host(rank));
    EXPECT_EQ(doubling.plans.bytes, is_first_of_host(rank) ? 2 * kBytes : 0) << "two sums of each host";
    const Traffic ten = traffic("0- 2px2p/8192");
    const Traffic five = traffic("0- 2px2p/16K");
    EXPECT_EQ(ten.plans.messages, 2 * five.plans.messages);
    EXPECT_NE(ten.plans.messages, usual.plans.messages);
    const Traffic again = traffic("");
    EXPECT_EQ(again.plans.messages, usual.plans.messages);
  });
}

TEST(Tuning, EverySizeFollowsItsRule) {
  GroupOptions options = two_by_two(64 * 1024);
  options.communicator.tuning = "0-64 2tx2d\n0-40000 rounds\n40001-100000 2px2p/8192\n100001- 2tx2t";
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
    EXPECT_EQ(plans(60000) > 0, is_first_of_host(rank)) << "to no end";
  });
}

TEST(Tuning, RulesHoldForTheSameRanksAndCostsForGroupsToo) {
  GroupOptions options = two_by_two();
  const std::string costs = Tuning::parse("costs latency=1").costs_text();
  options.communicator.tuning = "0- 2x2d\n" + costs;
  options.communicator.mode = "2tx2d";
  RankGroup group(options);
  group.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const auto same = communicator.duplicate("queue", {});
    EXPECT_EQ(same->options().tuning, options.communicator.tuning);
    EXPECT_EQ(same->options().mode, "2tx2d");
    const auto all = communicator.split(0, 0, {});  // as gradients are reduced by
    EXPECT_EQ(all->options().tuning, options.communicator.tuning);
    EXPECT_EQ(all->options().mode, "2tx2d");
    for (const auto& each : {same, all})
      EXPECT_EQ(traffic_of(group, *each, rank, kCount).plans.messages > 0, is_first_of_host(rank));
    for (const auto& others : {communicator.split(0, -communicator.rank(), {}),
                               communicator.split(communicator.rank() % 2, 0, {})}) {
      EXPECT_EQ(others->options().tuning, costs) << "which do not depend on the ranks";
      EXPECT_EQ(others->options().mode, "");
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

TEST(Tuning, ChoicesAreSharedAtTheSameCostsOnly) {
  RankGroup group(two_by_two(256 * 1024));
  group.run_transports([](const std::shared_ptr<Transport>& transport) {
    const auto is_staged = [&](PlanCache& plans) {
      return plans.algorithm(*transport, Collective::kAllreduce, 128 << 10, Order::kCanonical).is_rounds();
    };
    const Tuning far_hosts = Tuning::parse("costs latency=1");
    PlanCache first;
    PlanCache second;
    PlanCache third;
    second.set_tuning(far_hosts, *transport);
    second.share_choices(first);
    third.share_choices(first);
    EXPECT_FALSE(is_staged(first));
    EXPECT_TRUE(is_staged(second));
    third.set_tuning(far_hosts, *transport);
    EXPECT_TRUE(is_staged(third));
    EXPECT_FALSE(is_staged(first));
    third.share_choices(second);
    EXPECT_TRUE(is_staged(third));
  });
}

// Ranks that would wait for messages that no rank sends.
TEST(Tuning, RanksThatWouldRunDifferentAlgorithmsAreToldSo) {
  for (const OpKind kind : {OpKind::kAllreduce, OpKind::kReduceScatter, OpKind::kAllgather,
                            OpKind::kBroadcast, OpKind::kGather, OpKind::kScatter, OpKind::kAlltoall})
    for (const char* const other : {"rounds", "2px2c"}) {
      const bool has_no_plan =
          kind == OpKind::kGather || kind == OpKind::kScatter || kind == OpKind::kAlltoall;
      if (has_no_plan && other != std::string_view("rounds")) continue;
      SCOPED_TRACE(traits_of(kind).name + std::string(" by ") + other);
      RankGroup group(two_by_two(256 * 1024));
      expect_all_raised(group.outcomes([&](Communicator& communicator) {
        const std::string algorithm = communicator.rank() == 1 ? other : has_no_plan ? "messages" : "2px2p";
        const std::string rule =
            kind == OpKind::kAllreduce ? "0- " : std::string(traits_of(kind).name) + " 0- ";
        communicator.set_tuning(rule + algorithm);
        std::vector<float> data(10'000, 1.0F);
        std::vector<float> result(40'000);
        Request request{.kind = kind, .rows = data.size(), .input = data.data()};
        if (kind == OpKind::kAllreduce || kind == OpKind::kBroadcast) request.output = result.data();
        if (kind == OpKind::kBroadcast || kind == OpKind::kGather) request.root = 0;
        if (kind == OpKind::kScatter) request = communicator.rank() == 0 ? request : Request{.kind = kind};
        if (kind == OpKind::kScatter) request.root = 0;
        if (kind == OpKind::kAlltoall) request.splits.assign(4, 2'500);
        perform(communicator, request);
      }),
                        ErrorKind::kMismatch, "by different algorithms");
    }
}

}  // namespace
}  // namespace multiring
