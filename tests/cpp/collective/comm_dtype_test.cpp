// Allreduces whose elements cross from host to host in half precision: all ranks have the bits of the
// description, whichever way they took.

#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "support/errors.h"
#include "support/operations.h"
#include "support/oracles/comm_dtype_oracle.h"

namespace multiring {
namespace {

using namespace testing;

constexpr CommDtype kRounded[] = {CommDtype::kBFloat16, CommDtype::kFloat16};

Operation as_comm_dtype(const ReduceProblem& problem, CommDtype comm_dtype, const void* input, void* output) {
  Operation operation = reduction_of(problem, input, output, comm_dtype_name(comm_dtype));
  operation.descriptor.key.comm_dtype = comm_dtype;
  return operation;
}

ReduceProblem problem_of(const std::vector<std::vector<float>>& inputs, const Reduction& reduction) {
  ReduceProblem problem{DType::kFloat32, reduction, inputs[0].size(), {}, {}};
  for (const std::vector<float>& input : inputs) {
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(input.data());
    problem.inputs.emplace_back(bytes, bytes + input.size() * sizeof(float));
  }
  return problem;
}

std::vector<float> floats(const Bytes& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// What this rank gets.
Bytes reduced(Communicator& communicator, const ReduceProblem& problem, CommDtype comm_dtype,
              CallMode mode = CallMode::kSync) {
  Bytes data = problem.input(communicator.rank());
  perform(communicator, as_comm_dtype(problem, comm_dtype, data.data(), data.data()), mode);
  return data;
}

class CommDtypeAcrossHosts : public GroupTest {};

// 4096 elements are the most that take one round; then there are segments, of elements that no block ends
// with.
TEST_P(CommDtypeAcrossHosts, TheBitsOfTheDescription) {
  std::vector<ReduceProblem> problems;
  for (const std::size_t count : {0, 1, 37, 1025, 4096, 4097, 40001}) {
    problems.push_back(make_problem(DType::kFloat32, {ReduceOp::kSum}, count, size()));
    problems.push_back(make_problem(DType::kFloat32, {ReduceOp::kAverage, 0.3, 1.7}, count, size()));
    problems.push_back(make_problem(DType::kFloat32, {ReduceOp::kMax}, count, size()));
  }
  group_.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    for (const ReduceProblem& problem : problems) {
      for (const CommDtype comm_dtype : kRounded) {
        const Bytes expected = comm_dtype_oracle(comm_dtype, problem, communicator.hosts());
        for (const CallMode mode : kCallModes)
          EXPECT_TRUE(reduced(communicator, problem, comm_dtype, mode) == expected)
              << problem.text() << " as " << comm_dtype_name(comm_dtype) << " on rank " << rank;
        Bytes output(expected.size(), 0xcd);
        run(communicator, as_comm_dtype(problem, comm_dtype, problem.input(rank).data(), output.data()));
        EXPECT_TRUE(output == expected) << problem.text() << " out of place on rank " << rank;
      }
    }
  });
}

TEST_P(CommDtypeAcrossHosts, PiecesThatDifferByRank) {
  const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kAverage}, 40001, size());
  group_.run([&](Communicator& communicator) {
    Bytes data = problem.input(communicator.rank());
    Operation operation = as_comm_dtype(problem, CommDtype::kBFloat16, nullptr, nullptr);
    operation.pieces = pieces_of(problem, communicator.rank(), data, data);
    communicator.run(operation, {});
    EXPECT_TRUE(data == comm_dtype_oracle(CommDtype::kBFloat16, problem, communicator.hosts()));
  });
}

// How many run in one pass, and so whether by a plan, depends on timing; the bits do not.
TEST_P(CommDtypeAcrossHosts, ManyPendingOnes) {
  std::vector<ReduceProblem> problems;
  for (std::size_t index = 0; index < 24; ++index)
    problems.push_back(make_problem(DType::kFloat32, {ReduceOp::kSum}, 300 + 50 * index, size()));
  group_.run([&](Communicator& communicator) {
    const auto comm_dtype = [](std::size_t index) { return kRounded[index % 8 == 7 ? 1 : 0]; };
    std::deque<Bytes> arrays;
    std::vector<std::shared_ptr<Work>> works;
    for (std::size_t i = 0; i < problems.size(); ++i) {
      auto* const data = arrays.emplace_back(problems[i].input(communicator.rank())).data();
      works.push_back(communicator.submit(as_comm_dtype(problems[i], comm_dtype(i), data, data), 0, nullptr));
    }
    for (std::size_t i = 0; i < problems.size(); ++i) {
      works[i]->wait(Deadline::never(), {});
      EXPECT_TRUE(arrays[i] == comm_dtype_oracle(comm_dtype(i), problems[i], communicator.hosts())) << i;
    }
  });
}

TEST_P(CommDtypeAcrossHosts, ErrorsStayWithinTheBound) {
  std::vector<std::vector<float>> inputs;
  for (int rank = 0; rank < size(); ++rank)
    inputs.push_back(floats(periodic_elements(DType::kFloat32, 20001, 7U + rank, false)));
  const ReduceProblem problem = problem_of(inputs, {ReduceOp::kSum});
  group_.run([&](Communicator& communicator) {
    for (const CommDtype comm_dtype : kRounded) {
      const std::vector<float> found = floats(reduced(communicator, problem, comm_dtype));
      double worst = 0.0;
      for (std::size_t i = 0; i < problem.count; ++i) {
        double sum = 0.0;
        double magnitude = 0.0;
        for (const std::vector<float>& input : inputs) {
          sum += static_cast<double>(input[i]);
          magnitude += std::fabs(static_cast<double>(input[i]));
        }
        const double bound = comm_dtype_error_bound(comm_dtype, size(), magnitude);
        const double error = std::fabs(static_cast<double>(found[i]) - sum);
        ASSERT_LE(error, bound) << sum << " became " << found[i] << " as " << comm_dtype_name(comm_dtype);
        worst = std::max(worst, error / bound);
      }
      EXPECT_GT(worst, 0.1) << "nothing was rounded";
    }
  });
}

TEST_P(CommDtypeAcrossHosts, TooLargeForFloat16) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<std::vector<float>> inputs;
  for (int rank = 0; rank < size(); ++rank) {
    inputs.emplace_back(6000, 40000.0F);
    inputs.back()[1] = rank == 0 ? kInfinity : 1.0F;
    inputs.back()[2] = std::numeric_limits<float>::quiet_NaN();
  }
  group_.run([&](Communicator& communicator) {
    for (const double prescale : {1.0, 0x1p-10}) {
      const ReduceProblem problem = problem_of(inputs, {ReduceOp::kSum, prescale});
      const std::vector<float> found = floats(reduced(communicator, problem, CommDtype::kFloat16));
      const double largest = prescale == 1.0 ? kInfinity : 40000.0 * size() * prescale;
      EXPECT_TRUE(found[0] == largest || std::fabs(found[0] - largest) <= 0.125) << found[0];
      EXPECT_EQ(found[1], kInfinity);
      EXPECT_TRUE(std::isnan(found[2]));
    }
  });
}

std::vector<GroupCase> many_hosts() {
  std::vector<GroupCase> cases;
  for (const auto& [ranks, hosts] : {std::pair{2, 2}, {3, 2}, {4, 2}, {7, 2}, {3, 3}, {7, 3}, {4, 4}})
    cases.push_back({TransportKind::kCluster, ranks, 16 * 1024, false, hosts});
  cases.push_back({TransportKind::kCluster, 4, 4097, false, 2});
  cases.push_back({TransportKind::kClusterRing, 7, 16 * 1024, false, 5});
  cases.push_back({TransportKind::kClusterLine, 4, 16 * 1024, false, 4});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Groups, CommDtypeAcrossHosts, ::testing::ValuesIn(many_hosts()), kPrinted);

// Other plans round other sums where there are more than two hosts, but all ranks have the same bits. What
// each rank sends tells that the mode was taken, and half of the bytes that half precision was.
TEST(CommDtypeInModes, AllRanksHaveTheSameBits) {
  struct Case {
    int hosts;
    const char* mode;
    std::vector<std::size_t> messages;  ///< that each rank sends for a segment
  };
  const std::vector<Case> cases = {{2, "2x2", {2, 2, 2, 2}},   {2, "2x2d", {1, 1, 1, 1}},
                                   {2, "2tx2t", {1, 1, 0, 0}}, {4, "1x4", {6, 6, 6, 6}},
                                   {4, "1x4d", {2, 2, 2, 2}},  {4, "1x4t", {2, 1, 2, 1}},
                                   {4, "1x2x2", {4, 4, 4, 4}}, {4, "1x2tx2d", {2, 1, 2, 1}}};
  for (const Case& each : cases) {
    GroupOptions options(TransportKind::kCluster, 4, 4096);
    options.hosts = each.hosts;
    options.communicator.mode = each.mode;
    RankGroup group(options);
    const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kAverage}, 20480, 4);
    constexpr std::size_t kSegments = 10;  // each half of what plans stage in, four times 4096 bytes
    std::vector<Bytes> found(4);
    std::vector<Sent> whole(4);
    for (const CommDtype comm_dtype : {CommDtype::kFloat32, CommDtype::kBFloat16, CommDtype::kFloat16}) {
      group.run([&](Communicator& communicator) {
        const auto rank = static_cast<std::size_t>(communicator.rank());
        const SentCounter& counter = group.sent(communicator.rank()).plans;
        const Sent before = counter.read();
        found[rank] = reduced(communicator, problem, comm_dtype);
        const Sent sent = counter.read() - before;
        EXPECT_EQ(sent.messages, each.messages[rank] * kSegments) << each.mode << " on rank " << rank;
        if (comm_dtype == CommDtype::kFloat32) {
          whole[rank] = sent;
          return;
        }
        EXPECT_EQ(2 * sent.bytes, whole[rank].bytes) << each.mode << " on rank " << rank;
        if (each.hosts > 2) return;
        EXPECT_TRUE(found[rank] == comm_dtype_oracle(comm_dtype, problem, communicator.hosts()));
      });
      for (const Bytes& each_rank : found) EXPECT_TRUE(each_rank == found[0]) << each.mode;
    }
  }
}

// On chains and rings what is rounded would depend on the chunk.
TEST(CommDtypeInModes, ChainsAndRingsGiveWayInCanonicalOrder) {
  const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, 20480, 4);
  std::vector<Bytes> found;
  for (const char* const mode : {"1x4", "1x4c", "1x4r"}) {
    GroupOptions options(TransportKind::kCluster, 4, 4096);
    options.hosts = 4;
    options.communicator.mode = mode;
    RankGroup(options).run([&](Communicator& communicator) {
      const Bytes result = reduced(communicator, problem, CommDtype::kBFloat16);
      if (communicator.rank() == 0) found.push_back(result);
    });
  }
  EXPECT_TRUE(found[1] == found[0]);
  EXPECT_TRUE(found[2] == found[0]);
}

TEST(CommDtypeOnOneHost, NothingIsRounded) {
  for (const TransportKind transport : {TransportKind::kInproc, TransportKind::kShm}) {
    GroupOptions options(transport, 3);
    options.communicator.comm_dtype = CommDtype::kBFloat16;
    RankGroup group(options);
    const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, 40001, 3);
    group.run([&](Communicator& communicator) {
      for (const CommDtype comm_dtype : {CommDtype::kDefault, CommDtype::kFloat16})
        EXPECT_TRUE(reduced(communicator, problem, comm_dtype) == problem.expected);
    });
  }
}

// The default is for float32; an operation may choose for itself.
TEST(CommDtypeDefault, HoldsWhereNothingIsSaid) {
  GroupOptions options(TransportKind::kCluster, 3);
  options.communicator.comm_dtype = CommDtype::kBFloat16;
  RankGroup group(options);
  const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, 9001, 3);
  const ReduceProblem wide = make_problem(DType::kFloat64, {ReduceOp::kSum}, 9001, 3);
  group.run([&](Communicator& communicator) {
    const std::vector<int> hosts = communicator.hosts();
    EXPECT_TRUE(reduced(communicator, problem, CommDtype::kDefault) ==
                comm_dtype_oracle(CommDtype::kBFloat16, problem, hosts));
    EXPECT_TRUE(reduced(communicator, problem, CommDtype::kFloat16) ==
                comm_dtype_oracle(CommDtype::kFloat16, problem, hosts));
    EXPECT_TRUE(reduced(communicator, problem, CommDtype::kFloat32) == problem.expected);
    expect_reduced(communicator, wide);
    Bytes data = wide.input(communicator.rank());
    Operation narrowed = as_comm_dtype(wide, CommDtype::kFloat16, data.data(), data.data());
    error_of(ErrorKind::kUsage, [&] { communicator.run(narrowed, {}); });
  });
}

}  // namespace
}  // namespace multiring
