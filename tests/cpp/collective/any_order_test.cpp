// Allreduces that may add in any order, rings among them: the whole sum, the same bits on all ranks and in
// every run, and messages to the neighbours of the ring only.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "collective/plan/plan_cache.h"
#include "collective/plan/plan_schedule.h"
#include "support/errors.h"
#include "support/modes.h"
#include "support/operations.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

using namespace testing;

struct ModeCase {
  int size;
  int hosts;
  std::string mode;
  TransportKind transport = TransportKind::kCluster;

  GroupOptions options(std::size_t staging_bytes = kSmallStaging) const {
    GroupOptions options(transport, size, staging_bytes);
    options.hosts = hosts;
    options.communicator.mode = mode;
    options.communicator.order = Order::kAny;
    return options;
  }
};

void PrintTo(const ModeCase& each, std::ostream* out) {
  *out << transport_name(each.transport) << "_" << each.size << "_ranks_" << each.hosts << "_hosts_"
       << (each.mode.empty()               ? "automatic"
           : each.mode.starts_with("allr") ? "allreduce"
                                           : each.mode);
}

Bytes reduced(Communicator& communicator, const ReduceProblem& problem, Order order = Order::kDefault,
              CommDtype comm_dtype = CommDtype::kDefault) {
  Bytes data = problem.input(communicator.rank());
  Operation operation = reduction_of(problem, data.data(), data.data());
  operation.descriptor.key.order = order;
  operation.descriptor.key.comm_dtype = comm_dtype;
  perform(communicator, operation);
  return data;
}

class AnyOrder : public ::testing::TestWithParam<ModeCase> {};

TEST_P(AnyOrder, ExactSumsOfEveryDtypeAndReduction) {
  std::vector<ReduceProblem> problems;
  for (const DType dtype : kAllDTypes)
    for (const ReduceOp op : kAllReduceOps)
      if (is_accepted(dtype, op)) problems.push_back(exact_problem(dtype, {op}, 1025, GetParam().size));
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
    for (const std::size_t count : {0, 1, 37, 20001})
      problems.push_back(exact_problem(dtype, {ReduceOp::kSum, 0.5, 0.25}, count, GetParam().size));
  RankGroup group(GetParam().options());
  group.run([&](Communicator& communicator) {
    for (const ReduceProblem& problem : problems)
      for (const CallMode mode : kCallModes) expect_reduced(communicator, problem, mode);
  });
}

TEST_P(AnyOrder, PiecesThatDifferByRank) {
  const ReduceProblem problem = exact_problem(DType::kFloat32, {ReduceOp::kSum}, 20001, GetParam().size);
  RankGroup group(GetParam().options());
  group.run([&](Communicator& communicator) {
    Bytes data = problem.input(communicator.rank());
    Operation operation = reduction_of(problem, nullptr, nullptr);
    operation.pieces = pieces_of(problem, communicator.rank(), data, data);
    communicator.run(operation, {});
    expect_result(problem, data.data(), communicator.rank());
  });
}

// Infinities and NaN of any payload among the elements; pending ones, which would be fused by chance.
TEST_P(AnyOrder, TheSameBitsOnAllRanksAndInEveryRun) {
  const int size = GetParam().size;
  std::vector<ReduceProblem> problems;
  for (std::size_t index = 0; index < 8; ++index)
    problems.push_back(make_problem(DType::kFloat32, {ReduceOp::kSum}, 300 + 50 * index, size));
  problems.push_back(make_problem(DType::kBFloat16, {ReduceOp::kAverage}, 20001, size));
  RankGroup group(GetParam().options());
  std::vector<std::vector<Bytes>> found(static_cast<std::size_t>(size));
  const auto expect_found = [&](const std::vector<Bytes>& again, int rank) {
    for (std::size_t i = 0; i < problems.size(); ++i)
      EXPECT_TRUE(again[i] == found[0][i]) << problems[i].text() << " on rank " << rank;
  };
  group.run([&](Communicator& communicator) {
    for (const ReduceProblem& problem : problems)
      found[static_cast<std::size_t>(communicator.rank())].push_back(reduced(communicator, problem));
  });
  for (int rank = 0; rank < size; ++rank) expect_found(found[static_cast<std::size_t>(rank)], rank);
  group.run([&](Communicator& communicator) {
    std::vector<Bytes> arrays;
    for (const ReduceProblem& problem : problems) arrays.push_back(problem.input(communicator.rank()));
    std::vector<std::shared_ptr<Work>> works;
    for (std::size_t i = 0; i < problems.size(); ++i)
      works.push_back(
          communicator.submit(reduction_of(problems[i], arrays[i].data(), arrays[i].data()), 0, nullptr));
    for (const auto& work : works) work->wait(Deadline::never(), {});
    expect_found(arrays, communicator.rank());
  });
}

TEST_P(AnyOrder, HalfPrecisionBetweenHosts) {
  const ReduceProblem problem = exact_problem(DType::kFloat32, {ReduceOp::kSum}, 20001, GetParam().size);
  RankGroup group(GetParam().options());
  group.run([&](Communicator& communicator) {
    for (const CommDtype comm_dtype : {CommDtype::kBFloat16, CommDtype::kFloat16})
      EXPECT_TRUE(reduced(communicator, problem, Order::kDefault, comm_dtype) == problem.expected)
          << comm_dtype_name(comm_dtype) << " on rank " << communicator.rank();
  });
}

TEST_P(AnyOrder, TheCanonicalOrderForWhoAsksForIt) {
  const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, 20001, GetParam().size);
  RankGroup group(GetParam().options());
  group.run([&](Communicator& communicator) {
    EXPECT_TRUE(reduced(communicator, problem, Order::kCanonical) == problem.expected);
  });
}

/// Every algorithm between hosts of `patterns` (modes_of_all), and the cases of `others`.
std::vector<ModeCase> with_all(const std::vector<ModeCase>& patterns, std::vector<ModeCase> others,
                               bool has_blocks = false) {
  for (const ModeCase& pattern : patterns)
    for (const std::string& mode : modes_of_all(pattern.mode, Order::kAny, has_blocks))
      others.push_back({pattern.size, pattern.hosts, mode});
  return others;
}

std::vector<ModeCase> allreduces() {
  return with_all({{7, 7, "1x7?"}, {6, 3, "2x3?"}}, {{3, 3, "1x3r"},
                                                     {4, 4, "1x4r"},
                                                     {4, 2, "2x2r"},
                                                     {6, 3, "2tx3r"},
                                                     {8, 8, "1x4rx2r"},
                                                     {8, 8, "1x2px4r"},
                                                     {4, 4, "1x4d"},
                                                     {6, 3, ""},
                                                     {7, 3, ""},
                                                     {4, 4, "1x4r", TransportKind::kClusterMpi},
                                                     {6, 3, "2x3r", TransportKind::kClusterRelayed},
                                                     {6, 6, "", TransportKind::kClusterRing},
                                                     {8, 4, "2x4r", TransportKind::kClusterRing},
                                                     {5, 5, "", TransportKind::kClusterLine}});
}

INSTANTIATE_TEST_SUITE_P(Modes, AnyOrder, ::testing::ValuesIn(allreduces()), kPrinted);

/// This rank's block of a sum.
Bytes scattered(Communicator& communicator, const ReduceProblem& problem, Order order = Order::kDefault) {
  const Bytes data = problem.input(communicator.rank());
  Request request{.kind = OpKind::kReduceScatter,
                  .dtype = problem.dtype,
                  .rows = problem.count,
                  .input = data.data(),
                  .reduction = problem.reduction};
  Operation operation = make_operation(request);
  operation.descriptor.key.order = order;
  return result_of(perform(communicator, std::move(operation)));
}

Bytes block_of(const ReduceProblem& problem, const Communicator& communicator) {
  const Range block = block_range(problem.count, static_cast<std::size_t>(communicator.size()),
                                  static_cast<std::size_t>(communicator.rank()));
  const auto* const begin = problem.expected.data();
  return {begin + block.begin * dtype_size(problem.dtype), begin + block.end * dtype_size(problem.dtype)};
}

class ReduceScatterInAnyOrder : public ::testing::TestWithParam<ModeCase> {
 protected:
  GroupOptions options() const {
    GroupOptions options = GetParam().options();
    options.communicator.mode = "";
    if (!GetParam().mode.empty()) options.communicator.tuning = "reduce_scatter 0- " + GetParam().mode;
    return options;
  }
};

TEST_P(ReduceScatterInAnyOrder, ExactSumsOfEveryDtypeAndReduction) {
  std::vector<ReduceProblem> problems;
  for (const DType dtype : kAllDTypes)
    for (const ReduceOp op : kAllReduceOps)
      if (is_accepted(dtype, op)) problems.push_back(exact_problem(dtype, {op}, 1025, GetParam().size));
  for (const std::size_t count : {0, 1, 37, 20001})
    problems.push_back(exact_problem(DType::kBFloat16, {ReduceOp::kSum, 0.5, 0.25}, count, GetParam().size));
  RankGroup(options()).run([&](Communicator& communicator) {
    for (const ReduceProblem& problem : problems)
      EXPECT_TRUE(scattered(communicator, problem) == block_of(problem, communicator))
          << problem.text() << " on rank " << communicator.rank();
  });
}

TEST_P(ReduceScatterInAnyOrder, TheSameBitsInEveryRunAndTheCanonicalOnesForWhoAsksForThem) {
  const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, 20001, GetParam().size);
  RankGroup group(options());
  std::vector<Bytes> found(static_cast<std::size_t>(GetParam().size));
  group.run([&](Communicator& communicator) {
    found[static_cast<std::size_t>(communicator.rank())] = scattered(communicator, problem);
  });
  group.run([&](Communicator& communicator) {
    const Bytes again = scattered(communicator, problem);
    EXPECT_TRUE(again == found[static_cast<std::size_t>(communicator.rank())]);
    EXPECT_TRUE(scattered(communicator, problem, Order::kCanonical) == block_of(problem, communicator));
  });
}

std::vector<ModeCase> reduce_scatters() {
  return with_all({{7, 7, "1x7?"}, {7, 3, "3x3?"}},
                  {{3, 3, "1x3r"},
                   {4, 2, "2x2r"},
                   {4, 4, "allreduce:1x4r"},
                   {6, 3, ""},
                   {8, 4, "2x4r", TransportKind::kClusterRing},
                   {7, 5, "", TransportKind::kClusterRing},
                   {5, 5, "1x5c", TransportKind::kClusterLine}},
                  true);
}

INSTANTIATE_TEST_SUITE_P(Modes, ReduceScatterInAnyOrder, ::testing::ValuesIn(reduce_scatters()), kPrinted);

// Chunk c of the first half of the elements starts at the rank after its owner, and each rank on its way adds
// its own; the second half goes round the other way.
TEST(Ring, AddsInItsOrder) {
  constexpr int kSize = 4;
  constexpr std::size_t kChunk = 16;
  constexpr std::size_t kCount = 2 * kSize * kChunk;
  ReduceProblem problem{DType::kFloat32, {ReduceOp::kSum}, kCount, {}, {}};
  std::vector<std::vector<float>> values(kSize, std::vector<float>(kCount));
  for (int rank = 0; rank < kSize; ++rank) {
    for (std::size_t i = 0; i < kCount; ++i)
      values[rank][i] = std::ldexp(1.0F + static_cast<float>(i) / 64, 9 * ((rank + static_cast<int>(i)) % 4));
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(values[rank].data());
    problem.inputs.emplace_back(bytes, bytes + kCount * sizeof(float));
  }
  std::vector<float> expected(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    const std::size_t owner = i / kChunk % kSize;
    const bool backward = i >= kCount / 2;
    for (std::size_t hop = 1; hop <= kSize; ++hop)
      expected[i] += values[(owner + (backward ? kSize - hop : hop)) % kSize][i];
  }
  RankGroup group(ModeCase{kSize, kSize, "1x4r"}.options());
  group.run([&](Communicator& communicator) {
    const Bytes found = reduced(communicator, problem);
    EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.size()), 0);
  });
}

TEST(Ring, AHostSendsAsMuchToEachNeighbourAndNothingToOthers) {
  struct Case {
    int each;
    int hosts;
    const char* mode;
  };
  for (const auto& [each, hosts, mode] :
       {Case{1, 5, "1x5r"}, Case{2, 4, "2x4r"}, Case{3, 3, "3x3r"}, Case{2, 3, "2tx3r"}}) {
    const PlanOptions options{.count = 60'000, .mode = parse_mode(mode), .channels = 1, .order = Order::kAny};
    const Plan plan(make_cluster(std::vector<int>(static_cast<std::size_t>(hosts), each), {{1e9, 0.0}}),
                    options);
    for (int host = 0; host < hosts; ++host) {
      std::map<int, std::size_t> sent;  // by host
      for (int rank = host * each; rank < (host + 1) * each; ++rank)
        for (const RankSchedule::Step& step : make_schedule(plan, rank).steps)
          for (const RankSchedule::Message& message : step.sends)
            for (const RankSchedule::Bytes& part : message.parts) sent[message.peer / each] += part.size;
      const double wanted = 60'000.0 * sizeof(float) * (hosts - 1) / hosts;
      for (const int neighbour : {(host + 1) % hosts, (host + hosts - 1) % hosts}) {
        EXPECT_NEAR(static_cast<double>(sent[neighbour]), wanted, 0.01 * wanted) << mode;
        sent.erase(neighbour);
      }
      EXPECT_TRUE(sent.empty()) << mode;
    }
  }
}

/// What ranks raise whose hosts reach their neighbours only.
void expect_refused(TransportKind links, const char* mode, const std::string& text,
                    const RankGroup::Body& body) {
  RankGroup group(ModeCase{4, 4, mode, links}.options());
  const auto outcomes = group.outcomes(body);
  const auto refused = std::ranges::count_if(outcomes, [&](const std::optional<Error>& error) {
    return error && error->kind() == ErrorKind::kUsage &&
           std::string(error->what()).find(text) != std::string::npos;
  });
  EXPECT_GT(refused, 0);
}

TEST(HostsThatReachTheirNeighbours, RefuseWhatWouldNeedOthers) {
  const auto nothing = [](Communicator&) {};
  for (const char* const mode : {"1x4", "1x4d", "1x4t", "1x2cx2c"})
    expect_refused(TransportKind::kClusterRing, mode, "which are no neighbours", nothing);
  expect_refused(TransportKind::kClusterLine, "1x4r", "which are no neighbours", nothing);
  expect_refused(TransportKind::kClusterRing, "", "a group needs hosts that are neighbours",
                 [](Communicator& communicator) { communicator.split(communicator.rank() % 2, 0, {}); });
  expect_refused(TransportKind::kClusterLine, "", "pass the message on", [](Communicator& communicator) {
    std::vector<float> array(3);
    Operation operation = send_of(DType::kFloat32, array.size(), array.data(), 3);
    if (communicator.rank() == 0) communicator.send(operation, 0, {});
  });
}

TEST(HostsThatReachTheirNeighbours, FormGroupsThatAreALine) {
  RankGroup group(ModeCase{5, 5, "", TransportKind::kClusterRing}.options());
  const ReduceProblem problem = exact_problem(DType::kFloat32, {ReduceOp::kSum}, 20001, 3);
  group.run([&](Communicator& communicator) {
    const auto some = communicator.split(communicator.rank() < 3 ? 0 : 1, 0, {});
    if (communicator.rank() < 3) expect_reduced(*some, problem);
    const auto ring = communicator.split(0, -communicator.rank(), {});
    expect_reduced(*ring, exact_problem(DType::kFloat32, {ReduceOp::kSum}, 20001, 5));
  });
}

TEST(Order, IsPartOfWhatRanksCompare) {
  RankGroup group(ModeCase{4, 2, ""}.options());
  const ReduceProblem problem = exact_problem(DType::kFloat32, {ReduceOp::kSum}, 100, 4);
  expect_all_raised(group.outcomes([&](Communicator& communicator) {
    reduced(communicator, problem, communicator.rank() == 1 ? Order::kCanonical : Order::kAny);
  }),
                    ErrorKind::kMismatch, "in any order");
}

TEST(Order, OneCallMayDifferFromTheJob) {
  ModeCase each{6, 3, "2px3p"};
  GroupOptions options = each.options();
  options.communicator.order = Order::kCanonical;
  RankGroup group(options);
  const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, 20001, 6);
  const auto sent = [&](Communicator& communicator, Order order) {
    const SentCounter& counter = group.sent(communicator.rank()).plans;
    const Sent before = counter.read();
    reduced(communicator, problem, order);
    return (counter.read() - before).bytes;
  };
  group.run([&](Communicator& communicator) {
    // Ranks i and i + 3 are on one host, which are no subtree: their host sends two sums, or one.
    EXPECT_LT(sent(communicator, Order::kAny), sent(communicator, Order::kDefault));
    expect_reduced(communicator, problem);
  });
}

class RingInCanonicalOrder : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Order, RingInCanonicalOrder, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "by_a_rule" : "by_a_mode"; });

TEST_P(RingInCanonicalOrder, IsForThoseThatAllowAnyOrderAndTheOthersAreWarned) {
  GroupOptions options = ModeCase{4, 4, GetParam() ? "" : "1x4r"}.options();
  options.communicator.order = Order::kCanonical;
  if (GetParam()) options.communicator.tuning = "0- 1x4r";
  std::vector<std::string> warnings;
  std::mutex mutex;
  options.communicator.warn = [&](const std::string& text) {
    const std::lock_guard lock(mutex);
    warnings.push_back(text);
  };
  RankGroup group(options);
  const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, 20001, 4);
  group.run([&](Communicator& communicator) {
    expect_reduced(communicator, problem);
    EXPECT_FALSE(reduced(communicator, problem, Order::kAny) == problem.expected);
    communicator.set_tuning(communicator.tuning());
    expect_reduced(*communicator.split(0, 0, {}), problem);
  });
  ASSERT_EQ(warnings.size(), 1u);
  expect_text(warnings[0], GetParam() ? "line 1 of the tuning, 1x4r, has a ring" : "mode 1x4r has a ring");
  expect_text(warnings[0], "MULTIRING_ORDER=any");
}

TEST(Order, AnAverageInHalfPrecisionStaysInRange) {
  RankGroup group(ModeCase{6, 6, "1x6r"}.options());
  ReduceProblem problem{DType::kFloat32, {ReduceOp::kAverage}, 20001, {}, {}};
  problem.inputs.assign(6, encoded(DType::kFloat32, std::vector<int>(20001, 30000)));
  group.run([&](Communicator& communicator) {
    const Bytes found = reduced(communicator, problem, Order::kDefault, CommDtype::kFloat16);
    for (std::size_t i = 0; i < problem.count; ++i)
      ASSERT_NEAR(value_at(DType::kFloat32, found, i), 30000.0, 16 * 6) << i;  // of 2^-11 for each rank
  });
}

}  // namespace
}  // namespace multiring
