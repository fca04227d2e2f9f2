// More ranks than any list of fixed length in the collectives has room for, and many more than cores.

#include <vector>

#include "support/errors.h"
#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

constexpr int kMany = 67;

TEST(ManyRanks, AllreduceInEveryWay) {
  RankGroup group(GroupOptions(TransportKind::kInproc, kMany, 32 * 1024));
  // One-shot, two-phase in one and in several segments.
  std::vector<ReduceProblem> problems;
  for (const std::size_t count : {1, 900, 5000, 20000})
    problems.push_back(make_problem(DType::kFloat32, {ReduceOp::kAverage}, count, kMany));
  group.run([&](Communicator& communicator) {
    const auto region = communicator.allocate_symmetric(80000, {});
    for (const ReduceProblem& problem : problems) {
      expect_reduced(communicator, problem);
      expect_reduced(communicator, problem, CallMode::kSync, region->part(communicator.rank()));
    }
  });
}

TEST(ManyRanks, RowsAndGroups) {
  RankGroup group(GroupOptions(TransportKind::kInproc, kMany, 32 * 1024));
  group.run([](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    const std::vector<std::int32_t> mine(rank % 5, communicator.rank());
    Request request{
        .kind = OpKind::kAllgather, .dtype = DType::kInt32, .rows = mine.size(), .input = mine.data()};
    const Operation gathered = perform(communicator, request);
    const auto* all = reinterpret_cast<const std::int32_t*>(gathered.result.data());
    for (std::int32_t peer = 0; peer < kMany; ++peer)
      for (std::int32_t row = 0; row < peer % 5; ++row) ASSERT_EQ(*all++, peer);
    const std::vector<std::int32_t> to_all(kMany, communicator.rank());
    request = {.kind = OpKind::kAlltoall, .dtype = DType::kInt32, .rows = kMany, .input = to_all.data()};
    request.splits.assign(kMany, 1);
    const Operation exchanged = perform(communicator, request);
    for (std::int32_t peer = 0; peer < kMany; ++peer)
      ASSERT_EQ(reinterpret_cast<const std::int32_t*>(exchanged.result.data())[peer], peer);
    const auto row = communicator.split(communicator.rank() / 8, 0, {});
    EXPECT_EQ(row->size(), communicator.rank() < 64 ? 8 : 3);
    run_barrier(*row);
  });
}

// Lanes of less than a cache line: an error on all ranks, before anything is sent.
TEST(ManyRanks, StagingMemoryThatIsTooSmallForThem) {
  RankGroup group(GroupOptions(TransportKind::kInproc, kMany, kSmallStaging));
  const auto outcomes = group.outcomes([](Communicator& communicator) {
    std::vector<float> array(100);
    run(communicator, make_operation({.kind = OpKind::kReduceScatter, .rows = 100, .input = array.data()}));
  });
  for (const auto& outcome : outcomes) {
    ASSERT_TRUE(outcome.has_value());
    expect_text(*outcome, "MULTIRING_STAGING_BYTES is too small for 67 ranks");
  }
}

}  // namespace
}  // namespace multiring
