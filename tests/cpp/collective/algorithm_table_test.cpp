// The table of algorithms against what ranks send when they run them.

#include "collective/plan/algorithm_table.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "support/errors.h"
#include "support/operations.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

using namespace testing;

const std::vector<Interface> kInterface{{1.25e9, 20e-6}};

struct Layout {
  std::vector<int> ranks;
  Order order = Order::kCanonical;
  TransportKind transport = TransportKind::kCluster;

  Cluster cluster() const {
    Cluster made = make_cluster(ranks, kInterface);
    if (transport == TransportKind::kClusterRing) made.links = HostLinks::kRing;
    if (transport == TransportKind::kClusterLine) made.links = HostLinks::kLine;
    return made;
  }
};

void PrintTo(const Layout& layout, std::ostream* out) {
  for (const int ranks : layout.ranks) *out << ranks << "_";
  *out << host_links_name(layout.cluster().links) << "_" << order_name(layout.order);
}

std::vector<AlgorithmRow> table_of(const Layout& layout, std::size_t count,
                                   Collective collective = Collective::kAllreduce) {
  PlanOptions options = collective_options(collective, count, layout.cluster().size());
  options.order = layout.order;
  return AlgorithmTable(layout.cluster(), {}, 1 << 20).rows(options);
}

class AlgorithmTable : public ::testing::TestWithParam<Layout> {};

/// Runs a collective of `count` elements by the algorithm of a row, or as the job chooses; what the busiest
/// rank sends by what carries that algorithm's messages.
std::size_t sent_by(RankGroup& group, const AlgorithmRow& row, Collective collective, std::size_t count,
                    bool job_chooses = false) {
  const std::string name = collective_name(collective);
  const auto size = static_cast<std::size_t>(group.size());
  std::vector<std::size_t> bytes(size);
  group.run([&](Communicator& communicator) {
    if (!job_chooses) communicator.set_tuning(name + " 0- " + row.name);
    const WatchedNetworks& counters = group.sent(communicator.rank());
    const SentCounter& counter = row.name == "rounds" ? counters.rounds : counters.plans;
    std::vector<float> data(count, 1.0F);
    std::vector<float> result(count * size);
    Request request{.rows = count, .input = data.data(), .output = result.data()};
    const auto rank = static_cast<std::size_t>(communicator.rank());
    if (collective == Collective::kReduceScatter) request.kind = OpKind::kReduceScatter;
    if (collective == Collective::kAllgather) request.kind = OpKind::kAllgather;
    if (collective == Collective::kBroadcast) request.kind = OpKind::kBroadcast, request.root = 0;
    if (collective == Collective::kGather) request.kind = OpKind::kGather, request.root = 0;
    if (collective == Collective::kScatter) request.kind = OpKind::kScatter, request.root = 0;
    if (collective == Collective::kAlltoall) {
      request.kind = OpKind::kAlltoall;
      for (std::size_t to = 0; to < size; ++to) request.splits.push_back(block_range(count, size, to).size());
    }
    request.output_bytes = sizeof(float) * (request.kind == OpKind::kReduceScatter
                                                ? block_range(count, size, rank).size()
                                                : count * (request.kind == OpKind::kAllgather ? size : 1));
    if (!has_plans(collective)) request.output = nullptr;
    const std::size_t before = counter.read().bytes;
    perform(communicator, request);
    bytes[rank] = counter.read().bytes - before;
  });
  return *std::ranges::max_element(bytes);
}

/// The row of that name, also where the model does not compare its dimensions at that size.
AlgorithmRow row_at(const Layout& layout, std::size_t count, Collective collective, const std::string& name) {
  const std::vector<AlgorithmRow> rows = table_of(layout, count, collective);
  // Of a reduce-scatter's plans of an allreduce there is one, by whichever mode is quickest.
  const auto base = [](const std::string& full) { return full.substr(0, full.find(':') + 1); };
  const auto found = std::ranges::find_if(rows, [&](const AlgorithmRow& row) {
    return base(name).empty() ? row.name == name : base(row.name) == base(name);
  });
  if (found != rows.end()) return *found;
  PlanOptions options = collective_options(collective, count, layout.cluster().size());
  options.order = layout.order;
  options.mode = parse_mode(name);
  return multiring::AlgorithmTable(layout.cluster(), {}, 1 << 20).rows(options).front();
}

TEST_P(AlgorithmTable, CountsWhatTheBusiestRankSends) {
  const Layout& layout = GetParam();
  GroupOptions options(layout.transport, layout.cluster().size(), 1 << 20);
  options.layout = layout.ranks;
  options.communicator.order = layout.order;
  RankGroup group(options);
  // Rounds carry headers as well, as many for any count.
  for (const Collective collective : kAllCollectives) {
    // All pieces count as long as the longest, so that of what is divided all are to be alike.
    const bool is_divided = collective == Collective::kScatter || collective == Collective::kAlltoall;
    const std::size_t few_elements = is_divided ? 2520 : 1001;
    // One segment: in each of several the halves that go round a ring may differ by a cache line.
    const std::size_t large = is_divided                             ? 8 * few_elements
                              : collective == Collective::kAllgather ? 3001
                                                                     : 20001;
    for (const AlgorithmRow& few : table_of(layout, few_elements, collective)) {
      if (!few.excluded.empty()) continue;
      const AlgorithmRow many = row_at(layout, large, collective, few.name);
      EXPECT_EQ(sent_by(group, many, collective, large) - sent_by(group, few, collective, few_elements),
                many.rank_bytes - few.rank_bytes)
          << collective_name(collective) << " by " << few.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, AlgorithmTable,
    ::testing::Values(Layout{{1, 1, 1}}, Layout{{2, 2, 2}}, Layout{{2, 2, 2}, Order::kAny},
                      Layout{{2, 2, 2, 2}}, Layout{{4, 4}}, Layout{{3, 1, 2}},
                      Layout{{1, 1, 1, 1, 1, 1, 1, 1, 1}},
                      Layout{{1, 1, 1, 1, 1}, Order::kAny, TransportKind::kClusterRing},
                      Layout{{2, 2, 2, 2}, Order::kCanonical, TransportKind::kClusterRing},
                      Layout{{1, 1, 1, 1, 1}, Order::kAny, TransportKind::kClusterLine}),
    kPrinted);

const AlgorithmRow& row_of(const std::vector<AlgorithmRow>& rows, const std::string& name) {
  const auto found = std::ranges::find(rows, name, &AlgorithmRow::name);
  if (found == rows.end()) throw_usage("no row " + name);
  return *found;
}

TEST(AlgorithmTableRows, HopsAreMessagesThatWaitForEachOther) {
  const std::vector<AlgorithmRow> rows = table_of({std::vector<int>(8, 2)}, 1000);
  // One more than those of the plan: the exchange of headers.
  EXPECT_EQ(row_of(rows, "rounds").hops, 1);
  EXPECT_EQ(row_of(rows, "2px8p").hops, 1 + 2);
  EXPECT_EQ(row_of(rows, "2tx8d").hops, 1 + 3);
  EXPECT_EQ(row_of(rows, "2px8t").hops, 1 + 6);
  EXPECT_EQ(row_of(rows, "2px8c").hops, 1 + 14);
  EXPECT_EQ(row_of(table_of({std::vector<int>(64, 1)}, 1000), "rounds").hops, 3);
}

// Each message of a ring waits for the one before, so a rank's messages to a neighbour are the hops.
TEST(AlgorithmTableRows, ARingTakesItsHopsAmongNeighboursOnly) {
  constexpr std::size_t kCount = 1001;  // one segment
  for (const Layout& layout : {Layout{{1, 1, 1, 1, 1}, Order::kAny}, Layout{{2, 2, 2, 2}, Order::kAny},
                               Layout{{1, 1, 1, 1, 1}, Order::kAny, TransportKind::kClusterRing}}) {
    const auto hosts = static_cast<int>(layout.ranks.size());
    const int each = layout.ranks.front();
    const std::vector<AlgorithmRow> rows = table_of(layout, kCount);
    const std::string mode = std::to_string(each) + "px" + std::to_string(hosts) + "r";
    // A plan comes after the exchange of headers.
    const std::size_t hops = row_of(rows, mode).hops - row_of(rows, "rounds").hops;
    EXPECT_EQ(hops, 2U * static_cast<std::size_t>(hosts - 1));
    GroupOptions options(layout.transport, layout.cluster().size(), 1 << 20);
    options.layout = layout.ranks;
    options.communicator.order = layout.order;
    options.communicator.tuning = "0- " + mode;
    RankGroup group(options);
    group.run([&](Communicator& communicator) {
      std::vector<float> data(kCount, 1.0F);
      run(communicator, sum_in_place(data));
      for (const float sum : data) ASSERT_EQ(sum, static_cast<float>(group.size()));
    });
    for (int rank = 0; rank < group.size(); ++rank) {
      const std::map<int, std::size_t> sent = group.sent(rank).plan_peers.read();
      EXPECT_FALSE(sent.empty());
      for (const auto& [peer, messages] : sent) {
        EXPECT_EQ(messages, hops) << rank << " to " << peer;
        const int apart = (peer / each - rank / each + hosts) % hosts;
        EXPECT_TRUE(apart == 1 || apart == hosts - 1) << rank << " to " << peer;
      }
    }
  }
}

TEST(AlgorithmTableRows, SayWhyAnAlgorithmDoesNotRun) {
  const std::string order = "adds in the order of the ring (--order any)";
  EXPECT_EQ(row_of(table_of({{1, 1, 1, 1}}, 1000), "1px4r").excluded, order);
  EXPECT_EQ(row_of(table_of({{1, 1, 1, 1}, Order::kAny}, 1000), "1px4r").excluded, "");
  const Layout line{{1, 1, 1, 1}, Order::kAny, TransportKind::kClusterLine};
  EXPECT_EQ(row_of(table_of(line, 1000), "1px4r").excluded, "host 3 has no link to host 0");
  EXPECT_EQ(row_of(table_of(line, 1000), "1px4d").excluded, "host 0 has no link to host 2");
  EXPECT_EQ(row_of(table_of(line, 1000), "1px4c").excluded, "");
}

TEST(AlgorithmTableRows, AreChosenByTheModel) {
  const auto chosen = [](const Cluster& cluster, std::size_t count, const char* mode = "",
                         Order order = Order::kCanonical) {
    PlanOptions options;
    options.count = count;
    options.order = order;
    if (*mode != '\0') options.mode = parse_mode(mode);
    return multiring::AlgorithmTable(cluster, {}, 256 * 1024).choice(options);
  };
  const Cluster many = make_cluster(std::vector(64, 4), kInterface);
  EXPECT_EQ(chosen(many, 16).row.name, "rounds") << "few hops for small arrays";
  EXPECT_FALSE(chosen(many, 16).plan);
  const auto [row, plan] = chosen(many, 25 << 20);
  EXPECT_EQ(row.name, "4px8px8p") << "few bytes for large ones, and few messages beside additions";
  EXPECT_TRUE(row.is_chosen);
  EXPECT_GT(row.segments, 1U);
  EXPECT_LT(limit_seconds(plan.value(), {}), row.seconds);
  EXPECT_GT(limit_seconds(plan.value(), {}), 0.8 * row.seconds);
  const Cluster eight = make_cluster(std::vector(8, 4), kInterface);
  EXPECT_EQ(chosen(eight, 1 << 22, "4tx4x2t").row.name, "4tx4px2t") << "what is forced is kept";
  EXPECT_EQ(chosen(eight, 1 << 22, "4x8r", Order::kAny).row.name, "4px8r");
  expect_usage([&] { chosen(eight, 1 << 22, "4x8r"); }, "adds in the order of the ring");
  expect_usage([&] { chosen(eight, 1, "4x9"); }, "for 36 ranks");
  Cluster ring = eight;
  ring.links = HostLinks::kRing;
  expect_usage([&] { chosen(ring, 1, "4x8d"); }, "host 0 has no link to host 2");
}

TEST(AlgorithmTableRows, TheChosenOneIsWhatAJobRuns) {
  const auto expect_run = [](const Layout& layout, std::size_t count, const std::string& name,
                             const std::string& tuning = "") {
    GroupOptions options(layout.transport, layout.cluster().size(), 1 << 20);
    options.layout = layout.ranks;
    options.communicator.order = layout.order;
    options.communicator.tuning = tuning;
    RankGroup group(options);
    std::vector<std::size_t> planned(static_cast<std::size_t>(layout.cluster().size()));
    std::size_t expected = 0;
    group.run([&](Communicator& communicator) {
      const std::vector<AlgorithmRow> rows =
          communicator.algorithm_rows(Collective::kAllreduce, count * sizeof(float), layout.order);
      EXPECT_EQ(std::ranges::count_if(rows, &AlgorithmRow::is_chosen), 1);
      const AlgorithmRow& row = *std::ranges::find_if(rows, &AlgorithmRow::is_chosen);
      EXPECT_EQ(row.name, name);
      std::vector<float> data(count, 1.0F);
      run(communicator, allreduce_of(DType::kFloat32, count, data.data(), data.data(), "x"));
      const auto rank = static_cast<std::size_t>(communicator.rank());
      planned[rank] = group.sent(communicator.rank()).plans.read().bytes;
      if (rank == 0) expected = name == "rounds" ? 0 : row.rank_bytes;
    });
    EXPECT_EQ(*std::ranges::max_element(planned), expected) << name;
  };
  expect_run({{1, 1}}, 10'000, "rounds");
  expect_run({{1, 1, 1, 1}}, 1000, "rounds");
  expect_run({{1, 1, 1, 1}}, 1 << 20, "1px4p");
  expect_run({{3, 1, 2}}, 1 << 15, "3px3p", "costs bytes_per_second=1e6");
  expect_run({{1, 1, 1, 1}, Order::kAny, TransportKind::kClusterRing}, 1 << 20, "1px4r");
  expect_run({std::vector<int>(8, 1)}, 1 << 15, "1px8t", "costs shared_message_seconds=1e-3");
  expect_run({{1, 1, 1, 1}}, 1 << 14, "1px4d", "costs message_seconds=1");
}

TEST(AlgorithmTableRows, TheChosenOneIsWhatAJobRunsOfBlocks) {
  constexpr std::size_t kCount = 1 << 18;
  for (const Layout& layout : {Layout{{1, 1, 1, 1}}, Layout{{3, 1, 2}},
                               Layout{{2, 1, 3, 1}, Order::kCanonical, TransportKind::kClusterRing}}) {
    GroupOptions options(layout.transport, layout.cluster().size(), 1 << 20);
    options.layout = layout.ranks;
    RankGroup group(options);
    for (const Collective collective :
         {Collective::kReduceScatter, Collective::kAllgather, Collective::kBroadcast}) {
      std::vector<AlgorithmRow> rows;
      group.run([&](Communicator& communicator) {
        if (communicator.rank() == 0)
          rows = communicator.algorithm_rows(collective, kCount * sizeof(float), layout.order);
      });
      ASSERT_EQ(std::ranges::count_if(rows, &AlgorithmRow::is_chosen), 1);
      const AlgorithmRow& row = *std::ranges::find_if(rows, &AlgorithmRow::is_chosen);
      ASSERT_NE(row.name, "rounds");
      EXPECT_EQ(sent_by(group, row, collective, kCount, true), row.rank_bytes)
          << collective_name(collective) << " by " << row.name;
    }
  }
}

// A rank's work for each segment is not all in the model, by which ever smaller ones are a little quicker.
TEST(AlgorithmTableRows, BroadcastsAreNotCutIntoMoreSegmentsThanHelp) {
  for (const std::vector<int>& ranks : {std::vector<int>{1, 1, 1, 1}, {2, 2, 2, 2}}) {
    const Layout layout{ranks};
    for (const std::size_t bytes : {std::size_t{8} << 20, std::size_t{1} << 30}) {
      const PlanOptions options =
          collective_options(Collective::kBroadcast, bytes / sizeof(float), layout.cluster().size());
      const CrossingAlgorithm chosen =
          multiring::AlgorithmTable(layout.cluster(), {}, 256 * 1024).quickest(options);
      ASSERT_TRUE(chosen.is_plan());
      EXPECT_TRUE(chosen.segment == 0 || chosen.segment >= 256 * 1024) << chosen.segment;
    }
  }
}

TEST(AlgorithmTableRows, WithoutATuningAJobHasTheCostsOfTheModel) {
  PlanOptions options;
  options.count = 10'000;
  const std::vector<AlgorithmRow> described = table_of({{2, 2}}, options.count);
  RankGroup group(GroupOptions{TransportKind::kCluster, 4, 1 << 20});
  group.run([&](Communicator& communicator) {
    const std::vector<AlgorithmRow> rows =
        communicator.algorithm_rows(Collective::kAllreduce, options.count * sizeof(float), Order::kCanonical);
    EXPECT_EQ(row_of(rows, "rounds").seconds, row_of(described, "rounds").seconds);
  });
}

// What goes to one rank, or from each to each, has nothing to do with the others' hosts.
TEST(AlgorithmTableRows, MessagesCarryWhatIsForOneRank) {
  constexpr std::size_t kMany = 1 << 20;
  for (const Collective collective : {Collective::kGather, Collective::kScatter, Collective::kAlltoall}) {
    const std::vector<AlgorithmRow> many = table_of({{2, 2, 2, 2}}, kMany, collective);
    EXPECT_TRUE(row_of(many, "messages").is_chosen) << collective_name(collective);
    EXPECT_LE(row_of(many, "messages").rank_bytes, sizeof(float) * kMany);
    EXPECT_TRUE(row_of(table_of({{2, 2, 2, 2}}, 8, collective), "rounds").is_chosen);
    const Layout line{{1, 1, 1, 1}, Order::kCanonical, TransportKind::kClusterLine};
    EXPECT_EQ(row_of(table_of(line, kMany, collective), "messages").excluded, "host 0 has no link to host 2");
  }
}

TEST(AlgorithmTableRows, NoElementsNeedTheSameLinks) {
  const std::vector<AlgorithmRow> rows =
      table_of({{1, 1, 1, 1, 1}, Order::kCanonical, TransportKind::kClusterRing}, 0);
  EXPECT_EQ(row_of(rows, "1px5p").excluded, "host 0 has no link to host 2");
  EXPECT_TRUE(row_of(rows, "1px5c").excluded.empty());
}

TEST(AlgorithmTableRows, RoundsOfManySegmentsAddUp) {
  const AlgorithmRow one = row_of(table_of({{1, 1, 1}}, 1 << 18), "rounds");
  const AlgorithmRow many = row_of(table_of({{1, 1, 1}}, 16 << 18), "rounds");
  EXPECT_EQ(many.hops, 16 * one.hops);
  EXPECT_EQ(many.rank_bytes, 16 * one.rank_bytes);
  EXPECT_NEAR(many.seconds, 16 * one.seconds, 1e-9);
}

}  // namespace
}  // namespace multiring
