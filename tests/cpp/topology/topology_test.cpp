// The canonical tree, clusters, modes and stripes.

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "support/errors.h"
#include "support/oracles/plan_simulator.h"
#include "topology/canonical_tree.h"
#include "topology/cluster.h"
#include "topology/dimensions.h"
#include "topology/stripes.h"

namespace multiring {
namespace {

using namespace testing;

Cluster alike(int hosts, int ranks, Placement placement = Placement::kBlocks) {
  const std::vector<int> layout(static_cast<std::size_t>(hosts), ranks);
  return make_cluster(layout, {{1e9, 1e-5}}, {}, placement);
}

TEST(CanonicalParts, AreTheLargestNodesWithinEverySetOfRanks) {
  for (int size = 1; size <= 13; ++size) {
    std::set<Mask> nodes;
    for (int rank = 0; rank < size; ++rank) nodes.insert(Mask{1} << rank);
    for (const auto& [node, children] : canonical_nodes(size)) nodes.insert(node);
    for (Mask mask = 0; mask < Mask{1} << size; ++mask) {
      std::vector<int> ranks;
      for (int rank = 0; rank < size; ++rank)
        if ((mask >> rank & 1U) != 0) ranks.push_back(rank);
      std::set<Mask> expected;  // nodes within the set that no larger node within the set holds
      for (const Mask node : nodes)
        if ((node & ~mask) == 0 && std::ranges::none_of(nodes, [&](Mask other) {
              return other != node && (other & ~mask) == 0 && (node & ~other) == 0;
            }))
          expected.insert(node);
      std::set<Mask> found;
      for (const Subtree& part : canonical_parts(ranks, size))
        found.insert(((Mask{1} << part.size()) - 1U) << part.begin);
      ASSERT_EQ(found, expected) << size << " ranks, set " << mask;
    }
  }
}

TEST(Cluster, AlignedWhereEveryHostIsANode) {
  for (const int ranks : {1, 2, 4, 8})
    for (int hosts = 1; hosts < 10; ++hosts) EXPECT_TRUE(alike(hosts, ranks).aligned());
  EXPECT_TRUE(alike(1, 3).aligned());
  EXPECT_FALSE(alike(2, 3).aligned());
  EXPECT_TRUE(alike(3, 1, Placement::kRoundRobin).aligned());
  EXPECT_FALSE(alike(2, 2, Placement::kRoundRobin).aligned());
  EXPECT_TRUE(make_cluster(std::vector{4, 2, 1}, {{1e9, 0.0}}).aligned());
  EXPECT_FALSE(make_cluster(std::vector{1, 3}, {{1e9, 0.0}}).aligned());
}

TEST(Cluster, PlacesRanksInBlocksAndInTurn) {
  const Cluster blocks = make_cluster(std::vector{2, 1, 2}, {{1e9, 0.0}});
  EXPECT_EQ(blocks.hosts[2].ranks, (std::vector{3, 4}));
  EXPECT_FALSE(blocks.regular());
  const Cluster turns = make_cluster(std::vector{1, 3}, {{1e9, 0.0}}, {}, Placement::kRoundRobin);
  EXPECT_EQ(turns.hosts[0].ranks, (std::vector{0}));
  EXPECT_EQ(turns.hosts[1].ranks, (std::vector{1, 2, 3}));
  EXPECT_EQ(turns.host_of_rank(), (std::vector{0, 1, 1, 1}));
  EXPECT_EQ(turns.parts_of_host(1), (std::vector<Subtree>{{1, 2}, {2, 4}}));
}

TEST(Cluster, RefusesWhatIsNone) {
  expect_usage([] { make_cluster({}, {}); }, "at least one host");
  expect_usage([] { make_cluster(std::vector{2, 0}, {{1e9, 0.0}}); }, "not 0");
  expect_usage([] { make_cluster(std::vector{1, 1}, {}); }, "host 0 has no interface");
  expect_usage([] { make_cluster(std::vector{1, 1}, {{0.0, 0.0}}); }, "speed above 0");
  Cluster cluster = alike(2, 2);
  cluster.hosts[1].ranks = {1, 3};
  expect_usage([&] { cluster.validate(); }, "rank 1 is placed twice");
  cluster.hosts[1].ranks = {2, 7};
  expect_usage([&] { cluster.validate(); }, "rank 7 on host 1");
  cluster.hosts[1].ranks = {3, 2};
  expect_usage([&] { cluster.validate(); }, "not in order");
}

TEST(Channels, AreAsFastAsTheSlowestInterfaceOfTheirNumber) {
  Cluster cluster = alike(3, 1);
  cluster.hosts[0].interfaces = {{1e9, 0.0}, {4e9, 0.0}};
  cluster.hosts[1].interfaces = {{2e9, 0.0}, {3e9, 0.0}};
  const std::vector<Channel> all = make_channels(cluster, 8);
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].bytes_per_second, 1e9);
  EXPECT_EQ(all[1].bytes_per_second, 3e9) << "host 2 has no second interface that could be slower";
  const std::vector<Channel> one = make_channels(cluster, 1);
  ASSERT_EQ(one.size(), 1U);
  EXPECT_EQ(one[0].interface, 1);
  EXPECT_TRUE(make_channels(alike(1, 4), 8).empty());
}

TEST(Mode, IsReadAndWrittenAlike) {
  for (const char* const text : {"1", "4", "4x8", "4x8x2", "4px8r", "4tx8d", "2x2x2x2x2x2", "16777216"})
    EXPECT_EQ(format_mode(parse_mode(text)), text);
  const Mode mode = parse_mode("4tx8x2d");
  ASSERT_EQ(mode.size(), 3U);
  EXPECT_EQ(mode[0], (Dimension{4, Algorithm::kTree}));
  EXPECT_EQ(mode[1], (Dimension{8}));
  EXPECT_EQ(mode[2], (Dimension{2, Algorithm::kDoubling}));
}

TEST(Algorithms, AreToldApart) {
  std::set<char> letters;
  std::set<int> complexities;
  for (const Algorithm algorithm : kAllAlgorithms) {
    EXPECT_TRUE(letters.insert(traits_of(algorithm).letter).second) << traits_of(algorithm).name;
    EXPECT_TRUE(complexities.insert(traits_of(algorithm).complexity).second) << traits_of(algorithm).name;
  }
}

TEST(Mode, ThatCannotBeReadSaysWhereAndHowItIsWritten) {
  for (const char* const text : {"", "x", "4x", "x4", "4xx2", "0", "4x0", "-4", "+4", "4 x8", "4?", "4rr",
                                 "4x8R", "four", "99999999999999999999", "16777217", "4,8"}) {
    error_of(
        ErrorKind::kUsage, [&] { parse_mode(text); },
        "mode '" + std::string(text) + "': ", "written like 4x8x2");
  }
}

TEST(Mode, ThatDoesNotFitSaysTheNumbers) {
  const Cluster cluster = alike(12, 4);
  for (const char* const good : {"4x12", "4x3x4", "4x2x2x3", "4x12d", "4tx12", "4x1x12"})
    EXPECT_NO_THROW(require_fit(parse_mode(good), cluster)) << good;
  const auto refused = [&](const char* text) {
    return error_of(ErrorKind::kUsage, [&] { require_fit(parse_mode(text), cluster); });
  };
  EXPECT_STREQ(refused("4x8x2").what(),
               "mode 4x8x2 is for 64 ranks, but there are 48 (12 hosts with 4 ranks each)");
  expect_text(refused("48"), "the first dimension must be 4");
  expect_text(refused("8x6"), "the first dimension must be 4");
  expect_text(refused("4dx12"), "only the last dimension");
  expect_text(refused("16777216x16777216x16777216"), "more than 16777216 ranks");
  const Cluster irregular = make_cluster(std::vector{1, 3}, {{1e9, 0.0}});
  for (const char* const other : {"2x2", "2x3"})
    expect_usage(
        [&] { require_fit(parse_mode(other), irregular); },
        "does not fit the ranks, 4 (2 hosts with up to 3 ranks each); where hosts differ each counts as "
        "the largest: 3x2");
  EXPECT_EQ(format_mode(flat_mode(irregular)), "3x2");
  EXPECT_EQ(format_mode(flat_mode(alike(1, 4))), "4");
  EXPECT_EQ(format_mode(flat_mode(alike(5, 1))), "1x5");
}

TEST(Stripes, CoverEveryRangeInProportion) {
  const std::vector<std::vector<double>> weights{
      {1.0}, {1.0, 1.0}, {4.0, 1.0}, {1e9, 3e9, 0.5e9}, {1e-3, 1e9}};
  for (const std::vector<double>& shares : weights) {
    double total = 0.0;
    for (const double share : shares) total += share;
    for (const std::size_t granule : {1, 8, 64}) {
      for (std::size_t count = 0; count <= 700; count += 7) {
        const std::size_t first = 64 * (count % 5);
        const std::vector<Range> stripes = stripe_ranges({first, first + count}, shares, granule);
        ASSERT_EQ(stripes.size(), shares.size());
        std::size_t end = first;
        for (std::size_t index = 0; index < stripes.size(); ++index) {
          ASSERT_EQ(stripes[index].begin, end);
          end = stripes[index].end;
          ASSERT_LE(stripes[index].begin, end);
          ASSERT_TRUE(end == first + count || (end - first) % granule == 0);
          ASSERT_NEAR(static_cast<double>(stripes[index].size()),
                      static_cast<double>(count) * shares[index] / total, 1.5 * static_cast<double>(granule));
        }
        ASSERT_EQ(end, first + count);
      }
    }
  }
}

}  // namespace
}  // namespace multiring
