// Every way of an allreduce gives the bits of the canonical tree, on all ranks.

#include <memory>
#include <vector>

#include "collective/collectives.h"
#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

class AllreduceTest : public GroupTest {
 protected:
  /// In place, out of place and in pieces, synchronous and asynchronous.
  void expect_all_right(const std::vector<ReduceProblem>& problems) {
    group_.run([&](Communicator& communicator) {
      const int rank = communicator.rank();
      for (const ReduceProblem& problem : problems) {
        const Bytes& input = problem.input(rank);
        for (const CallMode mode : kCallModes) {
          expect_reduced(communicator, problem, mode);
          Bytes output(input.size(), 0xcd);
          const Bytes before = input;
          perform(communicator, reduction_of(problem, input.data(), output.data()), mode);
          expect_result(problem, output.data(), rank);
          EXPECT_TRUE(input == before) << "the input of " << problem.text() << " has changed";
          Bytes in_place = input;
          Operation operation = reduction_of(problem, nullptr, nullptr, "pieces");
          operation.pieces = pieces_of(problem, rank, in_place, output);
          perform(communicator, operation, mode);
          EXPECT_TRUE(output_of(operation.pieces) == problem.expected)
              << problem.text() << " in pieces, on rank " << rank;
        }
      }
    });
  }
};

TEST_P(AllreduceTest, EveryDtypeReductionAndFewElements) {
  std::vector<ReduceProblem> problems;
  for (const DType dtype : kAllDTypes) {
    for (const ReduceOp op : kAllReduceOps) {
      if (!is_accepted(dtype, op)) continue;
      for (const std::size_t count : {0, 1, 37}) problems.push_back(make_problem(dtype, {op}, count, size()));
    }
  }
  expect_all_right(problems);
}

TEST_P(AllreduceTest, Bitwise) {
  std::vector<ReduceProblem> problems;
  for (const ReduceOp op : {ReduceOp::kBitwiseAnd, ReduceOp::kBitwiseOr, ReduceOp::kBitwiseXor})
    for (const DType dtype : {DType::kBool, DType::kInt8, DType::kInt64})
      for (const std::size_t count : {1, 3000}) problems.push_back(make_problem(dtype, {op}, count, size()));
  expect_all_right(problems);
}

TEST_P(AllreduceTest, EveryDtypeInManySegments) {
  std::vector<ReduceProblem> problems;
  std::size_t turn = 0;
  for (const DType dtype : kAllDTypes) {
    // Eleven segments and a bit.
    const std::size_t count = (11 * kSmallStaging + 24) / dtype_size(dtype) + 1;
    for (ReduceOp op : {ReduceOp::kSum, kAllReduceOps[1 + turn++ % 4]}) {
      if (is_complex(dtype) && op != ReduceOp::kSum) op = ReduceOp::kAverage;
      if (!is_accepted(dtype, op)) op = op == ReduceOp::kSum ? ReduceOp::kMax : ReduceOp::kMin;
      problems.push_back(make_problem(dtype, {op}, count, size()));
    }
  }
  expect_all_right(problems);
}

TEST_P(AllreduceTest, ScaleFactors) {
  std::vector<ReduceProblem> problems;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64,
                            DType::kComplex128, DType::kInt32}) {
    for (const std::size_t count : {37, 3000}) {
      problems.push_back(make_problem(dtype, {ReduceOp::kSum, 0.3, 1.0}, count, size()));
      problems.push_back(make_problem(dtype, {ReduceOp::kAverage, 1.5, 0.7}, count, size()));
      if (is_accepted(dtype, ReduceOp::kMax))
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
    for (std::size_t begin = 0; begin < problems.size(); begin += std::size(counts)) {
      std::vector<Bytes> arrays;
      std::vector<Operation> operations;
      for (std::size_t i = 0; i < std::size(counts); ++i) {
        const ReduceProblem& problem = problems[begin + i];
        arrays.push_back(problem.input(transport->rank()));
        operations.push_back(reduction_of(problem, arrays.back().data(), arrays.back().data(), "part"));
      }
      std::vector<Operation*> pointers;
      for (Operation& operation : operations) pointers.push_back(&operation);
      const Descriptor fused = fused_descriptor(pointers);
      fused_allreduce(exchange, OperationCall{fused, {}}, pointers);
      for (std::size_t i = 0; i < std::size(counts); ++i)
        expect_result(problems[begin + i], arrays[i].data(), transport->rank());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Groups, AllreduceTest, ::testing::ValuesIn(crowded_and_roomy_cases()), kPrinted);

using DefaultStaging = AllreduceTest;

TEST_P(DefaultStaging, SeveralSegments) {
  const std::size_t bytes = kDefaultStaging * 5 / 2;
  expect_all_right({make_problem(DType::kFloat32, {ReduceOp::kSum}, bytes / 4 + 1, size()),
                    make_problem(DType::kBFloat16, {ReduceOp::kAverage}, bytes / 2 + 1, size()),
                    make_problem(DType::kFloat64, {ReduceOp::kMax}, bytes / 8 + 1, size()),
                    make_problem(DType::kFloat32, {ReduceOp::kSum}, 37, size())});
}

INSTANTIATE_TEST_SUITE_P(Groups, DefaultStaging,
                         ::testing::ValuesIn(group_cases({1, 2, 7}, {kDefaultStaging})), kPrinted);

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

std::vector<GroupCase> many_hosts() {
  std::vector<GroupCase> cases;
  for (const int hosts : {2, 3, 4})
    for (const std::size_t staging : {1024, 4097})
      cases.push_back({TransportKind::kCluster, hosts == 3 ? 7 : 4, staging, false, hosts});
  cases.push_back({TransportKind::kClusterMpi, 7, 4097, false, 3});
  cases.push_back({TransportKind::kClusterRing, 7, 4097, false, 5});
  cases.push_back({TransportKind::kClusterLine, 5, 1024, false, 4});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Groups, AcrossHosts, ::testing::ValuesIn(many_hosts()), kPrinted);

}  // namespace
}  // namespace multiring
