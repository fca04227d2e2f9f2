// The algorithms of an allreduce within one host, and when the model changes from one to another. That ranks
// run what it says: forced_modes_test.cpp.

#include "collective/plan/host_table.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "collective/collectives.h"
#include "collective/exchange.h"
#include "collective/plan/job_costs.h"
#include "collective/staged/sections.h"
#include "engine/symmetric_registry.h"
#include "support/errors.h"
#include "support/operations.h"
#include "support/rows.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

using namespace testing;

constexpr std::size_t kStaging = 256 * 1024;

HostTable table_of(int ranks, bool oversubscribed, std::size_t staging_bytes = kStaging,
                   Collective collective = Collective::kAllreduce) {
  return {collective, ranks, host_memory(ranks, oversubscribed), staging_bytes};
}

// docs/measurements/host-modes.csv: two ranks on two cores and on one, three to eight on two.
TEST(HostTable, RanksChangeWhereThatWasMeasured) {
  struct Case {
    int ranks;
    bool oversubscribed;
    Range max_rounds;
    Range min_direct;
  };
  for (const Case& each :
       {Case{2, false, {512, 1024}, {512, 1024}},
        Case{2, true, {32 * 1024, 96 * 1024}, {16 * 1024, 32 * 1024}},
        Case{3, true, {4096, 8192}, {2048, 8192}}, Case{4, true, {4096, 8192}, {2048, 8192}},
        Case{8, true, {4096, 8192}, {2048, 8192}}}) {
    SCOPED_TRACE(std::to_string(each.ranks) + " ranks");
    const HostChoice choice = table_of(each.ranks, each.oversubscribed).choice();
    EXPECT_GE(choice.max_rounds, each.max_rounds.begin);
    EXPECT_LT(choice.max_rounds, each.max_rounds.end);
    EXPECT_GT(choice.min_direct, each.min_direct.begin);
    EXPECT_LT(choice.min_direct, each.min_direct.end);
  }
}

// Of those that it chooses from none is quicker by more than a prediction is accurate, for ordinary arrays
// and for symmetric ones. A hundredth more than a table of several hosts allows: the choice has one limit of
// sizes, and times jump where a segment begins.
TEST(HostTable, RowsSayWhatTheChoiceDoes) {
  for (const bool oversubscribed : {false, true})
    for (const int ranks : {2, 3, 4, 7, 64})
      for (const std::size_t staging : {std::size_t{4096}, kStaging})
        for (const Collective collective : {Collective::kAllreduce, Collective::kReduceScatter}) {
          const HostTable table = table_of(ranks, oversubscribed, staging, collective);
          for (const std::size_t bytes : {0UL, 4UL, 100UL, 511UL, 512UL, 1024UL, 4095UL, 4096UL, 5000UL,
                                          8192UL, 20000UL, 30000UL, 262144UL, 262145UL, 1UL << 30}) {
            for (const bool symmetric : {false, true}) {
              double least = std::numeric_limits<double>::infinity();
              std::vector<double> chosen;  // direct is before staged, and after rounds
              for (const AlgorithmRow& row : table.rows(bytes, table.choice())) {
                if (!symmetric && !row.needs.empty()) continue;
                if (row.is_compared) least = std::min(least, row.seconds);
                if (!row.is_chosen) continue;
                if (!row.needs.empty()) chosen.clear();
                if (chosen.empty())
                  chosen.push_back(row.seconds);
                else
                  EXPECT_TRUE(symmetric) << "two are chosen for ordinary arrays";
              }
              ASSERT_EQ(chosen.size(), 1U) << bytes << " bytes of " << ranks << " ranks";
              EXPECT_LE(chosen.front(), least * (kAsGood + 0.01))
                  << bytes << " bytes of " << ranks << " ranks";
            }
          }
        }
}

TEST(HostTable, RoundsOfManySegmentsAreQuickWhereTheyAreSmall) {
  const HostTable table = table_of(2, true, 4096);
  EXPECT_GT(table.choice().max_rounds, 15 * 4096U);
  EXPECT_LT(table.choice().max_rounds, 35 * 4096U);
}

TEST(HostTable, AReduceScatterIsDirectOrStaged) {
  for (const bool oversubscribed : {false, true}) {
    const HostTable table = table_of(2, oversubscribed, kStaging, Collective::kReduceScatter);
    const std::vector<AlgorithmRow> rows = table.rows(4, table.choice());
    EXPECT_EQ(std::ranges::count_if(rows, [](const AlgorithmRow& row) { return row.name != "peers"; }), 2);
    EXPECT_EQ(table.choice().max_rounds, 0U);
    EXPECT_GT(table.choice().min_direct, oversubscribed ? 32 * 1024U : 4 * 1024U);
    EXPECT_LT(table.choice().min_direct, oversubscribed ? 64 * 1024U : 32 * 1024U);
  }
}

/// How often ranks synchronise in a reduce-scatter of symmetric arrays, ordinary ones, or both.
TEST(HostTable, AReduceScatterRunsWhatItSays) {
  constexpr int kRanks = 3;
  GroupOptions options(TransportKind::kInproc, kRanks, kSmallStaging);
  RankGroup(options).run_transports([&](const std::shared_ptr<Transport>& transport) {
    const int rank = transport->rank();
    Exchange exchange(*transport, "world");
    const std::size_t least = exchange.plans().host_choice(*transport, Collective::kReduceScatter).min_direct;
    const auto region = transport->allocate(2 * least, 1, {});
    SymmetricRegistry symmetric(rank);
    symmetric.add(region);
    std::vector<std::byte> ordinary(2 * least);
    for (const std::size_t bytes : {least - least % sizeof(float) - sizeof(float), least + 4 * sizeof(float)})
      for (const int symmetric_ranks : {0, 1, kRanks}) {
        std::byte* const array = rank < symmetric_ranks ? region->part(rank) : ordinary.data();
        const std::size_t count = bytes / sizeof(float);
        const Bytes input = input_of(DType::kFloat32, count, static_cast<std::size_t>(rank));
        std::memcpy(array, input.data(), input.size());
        Operation operation = make_operation({.kind = OpKind::kReduceScatter, .rows = count, .input = array});
        symmetric.locate_buffers(operation, true);
        const std::uint64_t before = exchange.round();
        reduce_scatter(exchange, OperationCall{operation.descriptor, {}}, operation);
        const Range block = block_range(count, kRanks, static_cast<std::size_t>(rank));
        EXPECT_TRUE(result_of(operation) ==
                    reduced_block(DType::kFloat32, ReduceOp::kSum, count, block, kRanks));
        const std::size_t longest = block_range(count, kRanks, 0).size() * sizeof(float);
        const std::size_t segments = Sections(kSmallStaging, kRanks, longest).segments();
        const bool looks = bytes >= least && symmetric_ranks > 0;
        EXPECT_EQ(exchange.round() - before,
                  looks && symmetric_ranks == kRanks ? 2 : segments + (looks ? 1 : 0))
            << bytes << " bytes, symmetric on " << symmetric_ranks;
      }
  });
}

// Or a rank would read what another one has not written, or has written elsewhere.
TEST(HostTable, RanksThatChooseDifferentlyAreTold) {
  constexpr int kRanks = 2;
  for (const std::string mode : {"staged", "direct", ""}) {
    RankGroup group(GroupOptions(TransportKind::kInproc, kRanks, kStaging));
    const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, 1001, kRanks);
    group.run_transports([&](const std::shared_ptr<Transport>& transport) {
      Exchange exchange(*transport, "world");
      const std::string own = transport->rank() == 0 ? "rounds" : mode;
      if (!own.empty()) exchange.plans().force(parse_algorithm(own), *transport);
      Bytes data = problem.input(transport->rank());
      Operation operation = reduction_of(problem, data.data(), data.data());
      error_of(
          ErrorKind::kMismatch,
          [&] { allreduce(exchange, OperationCall{operation.descriptor, {}}, operation); },
          "by different algorithms", "MULTIRING_MODE");
    });
  }
}

TEST(HostTable, IsForAllreducesOfOneHost) {
  for (const std::string mode : {"direct", "staged"}) {
    GroupOptions options(TransportKind::kCluster, 4, kStaging);
    options.communicator.mode = mode;
    expect_all_raised(RankGroup(options).outcomes([](Communicator&) {}), ErrorKind::kUsage,
                      "'" + mode + "' is for ranks of one host");
    expect_usage([&] { Tuning::parse("0- " + mode); }, "by MULTIRING_MODE");
    expect_usage([&] { Tuning::parse("broadcast 0- " + mode); }, "for allreduces only");
    expect_usage([&] { parse_algorithm(mode + "/64K"); }, "a segment, which have none");
  }
  expect_usage([] { table_of(1, false); }, "of a rank alone needs no algorithm");
}

TEST(HostTable, RanksTellWhatTheyRun) {
  GroupOptions options(TransportKind::kInproc, 2, kStaging);
  options.communicator.mode = "direct";
  RankGroup group(options);
  group.run([&](Communicator& communicator) {
    for (const AlgorithmRow& row :
         communicator.algorithm_rows(Collective::kAllreduce, 64 * 1024, Order::kCanonical))
      EXPECT_EQ(row.is_chosen, row.name != "rounds" && row.name != "peers")
          << "staged where arrays do not allow it";
    for (const AlgorithmRow& row :
         communicator.algorithm_rows(Collective::kReduceScatter, 64 * 1024, Order::kCanonical))
      EXPECT_EQ(row.is_chosen, row.name != "peers") << "modes are for allreduces";
    expect_usage([&] { communicator.algorithm_rows(Collective::kBroadcast, 64, Order::kCanonical); },
                 "no choice of algorithms on one host");
  });
}

}  // namespace
}  // namespace multiring
