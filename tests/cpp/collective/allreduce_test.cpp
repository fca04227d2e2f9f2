// Every way of an allreduce gives the bits of the canonical tree, on all ranks.

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

#include "collective/collectives.h"
#include "support/operations.h"
#include "support/oracles/problem.h"
#include "support/rank_group.h"

namespace multiring {
namespace {

using namespace testing;

class AllreduceTest : public GroupTest {
 protected:
  /// In place and out of place, synchronous and asynchronous.
  void expect_all_right(const std::vector<ReduceProblem>& problems) {
    group_.run([&](Communicator& communicator) {
      for (const ReduceProblem& problem : problems) {
        const Bytes& input = problem.inputs[static_cast<std::size_t>(communicator.rank())];
        for (const CallMode mode : kCallModes) {
          Bytes in_place = input;
          Operation operation = allreduce_of(problem.dtype, problem.count, in_place.data(), in_place.data(),
                                             "in place", problem.reduction);
          perform(communicator, operation, mode);
          EXPECT_TRUE(in_place == problem.expected)
              << problem.text() << " in place on rank " << communicator.rank();
          Bytes output(input.size(), 0xcd);
          const Bytes before = input;
          operation = allreduce_of(problem.dtype, problem.count, input.data(), output.data(), "out of place",
                                   problem.reduction);
          perform(communicator, operation, mode);
          EXPECT_TRUE(output == problem.expected) << problem.text() << " on rank " << communicator.rank();
          EXPECT_TRUE(input == before) << "the input of " << problem.text() << " has changed";
          expect_right_in_pieces(communicator, problem, mode);
        }
      }
    });
  }

  /// Cut differently on every rank, with empty pieces, every other one in place.
  static void expect_right_in_pieces(Communicator& communicator, const ReduceProblem& problem,
                                     CallMode mode) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    const Bytes& input = problem.inputs[rank];
    Bytes in_place = input;
    Bytes output(input.size(), 0xcd);
    Operation operation =
        allreduce_of(problem.dtype, problem.count, nullptr, nullptr, "pieces", problem.reduction);
    const std::size_t element = dtype_size(problem.dtype);
    std::size_t length = 1 + rank;
    for (std::size_t begin = 0; begin < problem.count; length = length * 3 % 1021) {
      const std::size_t offset = begin * element;
      const std::size_t bytes = std::min(length - 1, problem.count - begin) * element;
      auto* const here = reinterpret_cast<std::byte*>(in_place.data()) + offset;
      auto* const there = reinterpret_cast<std::byte*>(output.data()) + offset;
      operation.pieces.push_back({here, operation.pieces.size() % 2 == 0 ? here : there, bytes});
      begin += length - 1;
    }
    perform(communicator, operation, mode);
    Bytes found;
    for (const Piece& piece : operation.pieces) {
      const auto* const begin = reinterpret_cast<const unsigned char*>(piece.output);
      found.insert(found.end(), begin, begin + piece.bytes);
    }
    EXPECT_TRUE(found == problem.expected) << problem.text() << " in pieces, on rank " << rank;
  }
};

TEST_P(AllreduceTest, EveryDtypeReductionAndFewElements) {
  std::vector<ReduceProblem> problems;
  for (const DType dtype : kAllDTypes) {
    for (const ReduceOp op : kAllReduceOps) {
      if (dtype == DType::kBool && op == ReduceOp::kAverage) continue;
      for (const std::size_t count : {0, 1, 37}) problems.push_back(make_problem(dtype, {op}, count, size()));
    }
  }
  expect_all_right(problems);
}

TEST_P(AllreduceTest, EveryDtypeInManySegments) {
  std::vector<ReduceProblem> problems;
  std::size_t turn = 0;
  for (const DType dtype : kAllDTypes) {
    // Eleven segments and a bit.
    const std::size_t count = (11 * kSmallStaging + 24) / dtype_size(dtype) + 1;
    problems.push_back(make_problem(dtype, {ReduceOp::kSum}, count, size()));
    ReduceOp other = kAllReduceOps[1 + turn++ % 4];
    if (dtype == DType::kBool && other == ReduceOp::kAverage) other = ReduceOp::kMin;
    problems.push_back(make_problem(dtype, {other}, count, size()));
  }
  expect_all_right(problems);
}

TEST_P(AllreduceTest, ScaleFactors) {
  std::vector<ReduceProblem> problems;
  for (const DType dtype :
       {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64, DType::kInt32}) {
    for (const std::size_t count : {37, 3000}) {
      problems.push_back(make_problem(dtype, {ReduceOp::kSum, 0.3, 1.0}, count, size()));
      problems.push_back(make_problem(dtype, {ReduceOp::kAverage, 1.5, 0.7}, count, size()));
      problems.push_back(make_problem(dtype, {ReduceOp::kMax, -1.0, 3.0}, count, size()));
    }
  }
  expect_all_right(problems);
}

// Counts around the ends of slices, segments and cache lines.
TEST_P(AllreduceTest, CountsAroundEveryBoundary) {
  std::vector<ReduceProblem> problems;
  for (const std::size_t bytes : {64, 64 * 7, 4096, 2 * 4096, 16 * 1024, 37440, 40960}) {
    for (const std::size_t more : {0, 1, 2}) {
      problems.push_back(make_problem(DType::kBFloat16, {ReduceOp::kSum}, bytes / 2 - 1 + more, size()));
      problems.push_back(make_problem(DType::kFloat64, {ReduceOp::kSum}, bytes / 8 - 1 + more, size()));
    }
  }
  expect_all_right(problems);
}

// Several in one pass, in few rounds and many, at places that are not aligned for the processor.
TEST_P(AllreduceTest, FusedHasTheSameBits) {
  const std::size_t counts[] = {3, 0, 1, 129, 37, 500, 2, 2100, 1};
  std::vector<ReduceProblem> problems;
  for (const DType dtype : kAllDTypes)
    for (const std::size_t count : counts)
      problems.push_back(make_problem(dtype, {ReduceOp::kSum}, count, size()));
  group_.run_transports([&](const std::shared_ptr<Transport>& transport) {
    Exchange exchange(*transport, "world");
    const auto rank = static_cast<std::size_t>(transport->rank());
    for (std::size_t begin = 0; begin < problems.size(); begin += std::size(counts)) {
      std::vector<Bytes> arrays;
      std::vector<Operation> operations;
      for (std::size_t i = 0; i < std::size(counts); ++i) {
        const ReduceProblem& problem = problems[begin + i];
        arrays.push_back(problem.inputs[rank]);
        operations.push_back(allreduce_of(problem.dtype, problem.count, arrays.back().data(),
                                          arrays.back().data(), "part", problem.reduction));
      }
      std::vector<Operation*> pointers;
      for (Operation& operation : operations) pointers.push_back(&operation);
      const Descriptor fused = fused_descriptor(pointers);
      fused_allreduce(exchange, OperationCall{fused, {}}, pointers);
      std::size_t at = 0;
      for (std::size_t i = 0; i < std::size(counts); ++i) {
        const ReduceProblem& problem = problems[begin + i];
        EXPECT_TRUE(arrays[at++] == problem.expected) << problem.text() << " fused, on rank " << rank;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Groups, AllreduceTest, ::testing::ValuesIn(crowded_and_roomy_cases()),
                         [](const auto& info) { return case_name(info.param); });

using DefaultStaging = AllreduceTest;

TEST_P(DefaultStaging, SeveralSegments) {
  const std::size_t bytes = kDefaultStaging * 5 / 2;
  expect_all_right({make_problem(DType::kFloat32, {ReduceOp::kSum}, bytes / 4 + 1, size()),
                    make_problem(DType::kBFloat16, {ReduceOp::kAverage}, bytes / 2 + 1, size()),
                    make_problem(DType::kFloat64, {ReduceOp::kMax}, bytes / 8 + 1, size()),
                    make_problem(DType::kFloat32, {ReduceOp::kSum}, 37, size())});
}

INSTANTIATE_TEST_SUITE_P(Groups, DefaultStaging,
                         ::testing::ValuesIn(group_cases({1, 2, 7}, {kDefaultStaging})),
                         [](const auto& info) { return case_name(info.param); });

// Hosts of few and of many ranks, and staging memory that holds hardly anything, or no whole number of lines.
class AcrossHosts : public AllreduceTest {};

TEST_P(AcrossHosts, EveryPlanHasTheSameBits) {
  std::vector<ReduceProblem> problems;
  for (const std::size_t count : {1, 40, 2000, 40001}) {
    problems.push_back(make_problem(DType::kFloat32, {ReduceOp::kSum}, count, size()));
    problems.push_back(make_problem(DType::kFloat16, {ReduceOp::kAverage, 0.3, 1.7}, count, size()));
    problems.push_back(make_problem(DType::kInt8, {ReduceOp::kSum, 0.5, 2.0}, count, size()));
  }
  expect_all_right(problems);
}

// Every algorithm in two dimensions, on hosts that are, and are not, subtrees of the sum; more dimensions;
// and what is chosen where hosts differ, for which no mode can be asked.
TEST(ForcedModes, EveryAlgorithmHasTheSameBits) {
  struct Case {
    std::vector<int> layout;  // empty: two hosts have the ranks 0, 3 and 1, 2
    const char* mode;
  };
  const std::vector<Case> cases = {{{}, "2x2d"},
                                   {{}, "2tx2t"},
                                   {{}, "2tx2d"},
                                   {{}, "2rx2r"},
                                   {{1, 1, 1, 1}, "1x4d"},
                                   {{1, 1, 1, 1}, "1x4t"},
                                   {{1, 1, 1, 1}, "1x2x2"},
                                   {{1, 1, 1, 1}, "1x2tx2d"},
                                   {{2, 2, 2}, "2x3"},
                                   {{2, 2, 2}, "2x3d"},
                                   {{2, 2, 2}, "2tx3t"},
                                   {{3, 3}, "3tx2"},
                                   {{3, 3}, "3x2d"},
                                   {{1, 1, 1, 1, 1, 1, 1}, "1x7d"},
                                   {{1, 1, 1, 1, 1, 1, 1}, "1x7t"},
                                   {{1, 1, 1, 1, 1, 1}, "1x2tx3d"},
                                   {{2, 2, 2, 2}, "2tx2x2d"},
                                   {{2, 2, 2, 2, 2, 2}, "2x3x2"},
                                   {{1, 1, 1, 1, 1, 1, 1, 1}, "1x2x2x2d"},
                                   {{3, 1, 2}, ""},
                                   {{1, 3}, ""},
                                   {{4, 3, 2, 1}, ""}};
  for (const Case& each : cases) {
    const int size = each.layout.empty() ? 4 : std::accumulate(each.layout.begin(), each.layout.end(), 0);
    GroupOptions options(TransportKind::kCluster, size, 4096);
    options.layout = each.layout;
    options.communicator.mode = each.mode;
    RankGroup group(options);
    std::vector<ReduceProblem> problems;
    for (const std::size_t count : {0, 1, 37, 20001}) {
      problems.push_back(make_problem(DType::kFloat32, {ReduceOp::kAverage}, count, size));
      problems.push_back(make_problem(DType::kBFloat16, {ReduceOp::kSum, 0.5, 3.0}, count, size));
    }
    group.run([&](Communicator& communicator) {
      for (const ReduceProblem& problem : problems) {
        Bytes data = problem.inputs[static_cast<std::size_t>(communicator.rank())];
        run(communicator,
            allreduce_of(problem.dtype, problem.count, data.data(), data.data(), "x", problem.reduction));
        EXPECT_TRUE(data == problem.expected)
            << problem.text() << ", " << each.layout.size() << " hosts, mode " << each.mode;
      }
    });
  }
}

TEST(ForcedModes, OnesThatDoNotFitAreRefused) {
  for (const char* const mode : {"4", "2x3", "1x4", "2xx2", "2dx2"}) {
    GroupOptions options(TransportKind::kCluster, 4, 4096);
    options.communicator.mode = mode;
    RankGroup group(options);
    try {
      group.run([](Communicator&) {});
      ADD_FAILURE() << mode;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage) << mode;
    }
  }
}

// Every class of sizes goes another way, and fused ones go as their sum of bytes says.
TEST(TunedBySize, EveryWayHasTheSameBits) {
  struct Case {
    int hosts;
    const char* tuning;
  };
  for (const Case& each :
       {Case{2, "2x2:8=rounds,200=2tx2d,5000=auto/64,20000=2x2t/1024,50000=rounds,60000=2x2/500"},
        Case{4, "4x1:4=1x4d,200=rounds,20000=1x4t,60000=1x2x2d/2048"},
        Case{3, "2+1+1:200=rounds,5000=auto/100,60000=rounds"},
        Case{2, "4x4:60000=4x4d"}}) {  // of another cluster
    GroupOptions options(TransportKind::kCluster, 4, 4096);
    options.hosts = each.hosts;
    options.communicator.tuning = each.tuning;
    RankGroup group(options);
    std::vector<ReduceProblem> problems;
    for (const std::size_t count : {0, 1, 37, 1000, 4000, 11000, 20001}) {
      problems.push_back(make_problem(DType::kFloat32, {ReduceOp::kAverage}, count, 4));
      problems.push_back(make_problem(DType::kBFloat16, {ReduceOp::kSum, 0.5, 3.0}, count, 4));
    }
    group.run([&](Communicator& communicator) {
      for (const ReduceProblem& problem : problems) {
        for (const CallMode mode : kCallModes) {
          Bytes data = problem.inputs[static_cast<std::size_t>(communicator.rank())];
          Operation operation =
              allreduce_of(problem.dtype, problem.count, data.data(), data.data(), "x", problem.reduction);
          perform(communicator, operation, mode);
          EXPECT_TRUE(data == problem.expected) << problem.text() << ", tuning " << each.tuning;
        }
      }
    });
  }
}

std::vector<GroupCase> many_hosts() {
  std::vector<GroupCase> cases;
  for (const int hosts : {2, 3, 4})
    for (const std::size_t staging : {1024, 4097})
      cases.push_back({TransportKind::kCluster, hosts == 3 ? 7 : 4, staging, false, hosts});
  cases.push_back({TransportKind::kClusterMpi, 7, 4097, false, 3});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Groups, AcrossHosts, ::testing::ValuesIn(many_hosts()), [](const auto& info) {
  return case_name(info.param) + "_hosts" + std::to_string(info.param.hosts);
});

}  // namespace
}  // namespace multiring
