// The algorithms of an allreduce within one host, and when the model changes from one to another. That ranks
// run what it says: forced_modes_test.cpp.

#include "collective/plan/host_table.h"

#include <algorithm>
#include <string>
#include <vector>

#include "collective/collectives.h"
#include "collective/exchange.h"
#include "collective/plan/job_costs.h"
#include "support/errors.h"
#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

constexpr std::size_t kStaging = 256 * 1024;

HostTable table_of(int ranks, bool oversubscribed, std::size_t staging_bytes = kStaging) {
  Cluster cluster = make_cluster(std::vector{ranks}, {});
  const JobCosts costs = host_costs(ranks, oversubscribed);
  set_speeds(cluster, costs);
  return {ranks, cluster.hosts[0].memory, costs.memory_bytes_per_second, staging_bytes};
}

TEST(HostTable, TwoRanksChangeWhereThatWasMeasured) {
  const HostChoice roomy = table_of(2, false).choice();
  EXPECT_GE(roomy.max_rounds, 1024U);
  EXPECT_LT(roomy.max_rounds, 1100U);
  EXPECT_EQ(roomy.min_direct, kMinSymmetricBytes) << "buffers below are not looked for";
  const HostChoice crowded = table_of(2, true).choice();
  EXPECT_GE(crowded.max_rounds, 24U * 1024);
  EXPECT_LT(crowded.max_rounds, 27U * 1024);
  EXPECT_GT(crowded.min_direct, 8000U);
  EXPECT_LE(crowded.min_direct, 8192U);
}

TEST(HostTable, RowsSayWhatTheChoiceDoes) {
  for (const bool oversubscribed : {false, true})
    for (const int ranks : {2, 3, 4, 7, 64})
      for (const std::size_t staging : {std::size_t{4096}, kStaging}) {
        const HostTable table = table_of(ranks, oversubscribed, staging);
        const HostChoice choice = table.choice();
        EXPECT_LE(choice.max_rounds, staging);
        for (const std::size_t bytes : {0UL, 4UL, 100UL, 511UL, 512UL, 1024UL, 4095UL, 4096UL, 5000UL, 8192UL,
                                        20000UL, 30000UL, 262144UL, 262145UL, 1UL << 30}) {
          for (const AlgorithmRow& row : table.rows(bytes)) {
            EXPECT_GT(row.seconds, 0.0);
            const bool is_rounds = bytes <= choice.max_rounds;
            if (row.name == "staged") {
              EXPECT_EQ(row.is_chosen, !is_rounds) << bytes;
            } else if (row.name == "direct") {
              EXPECT_EQ(row.is_chosen, bytes >= std::max(choice.min_direct, kMinSymmetricBytes)) << bytes;
            } else {
              EXPECT_EQ(row.is_chosen, is_rounds) << bytes;
            }
          }
        }
      }
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
  expect_usage([] { table_of(1, false); }, "a rank alone");
}

TEST(HostTable, RanksTellWhatTheyRun) {
  GroupOptions options(TransportKind::kInproc, 2, kStaging);
  options.communicator.mode = "direct";
  RankGroup group(options);
  group.run([&](Communicator& communicator) {
    for (const AlgorithmRow& row :
         communicator.algorithm_rows(Collective::kAllreduce, 64 * 1024, Order::kCanonical))
      EXPECT_EQ(row.is_chosen, row.name != "rounds") << "staged where arrays do not allow it";
    expect_usage([&] { communicator.algorithm_rows(Collective::kBroadcast, 64, Order::kCanonical); },
                 "no choice of algorithms on one host");
  });
}

}  // namespace
}  // namespace multiring
