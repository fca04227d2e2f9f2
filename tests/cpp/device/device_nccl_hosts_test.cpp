// Allreduces by NCCL within each of several hosts, and by the core across them, on the stand-ins for NCCL and
// for the driver: ranks as threads, on two devices that they share.

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "support/device_array.h"
#include "support/device_bucket.h"
#include "support/errors.h"
#include "support/nccl_folder.h"
#include "support/oracles/comm_dtype_oracle.h"
#include "support/sanitizer.h"

namespace multiring {
namespace {

using namespace testing;

using Values = std::vector<float>;

/// What a rank has; sums of it are exact.
Values values_of(int rank, std::size_t count) {
  Values values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<float>(i % 97) + 100 * static_cast<float>(rank);
  return values;
}

class DeviceNcclHostsTest : public ::testing::TestWithParam<std::tuple<Progress, std::vector<int>>> {
 protected:
  static constexpr std::size_t kCount = 20'001;
  /// As the gradients of a model, of which ranks have shares that begin and end within one.
  static constexpr std::size_t kPieces[] = {3, kCount, 0, 1, 700, 65'537};

  DeviceNcclHostsTest() : layout_{std::get<1>(GetParam()), NcclScope::kHierarchical}, group_(options()) {
    ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    gpu_.set_progress(std::get<0>(GetParam()), 3);
  }

  GroupOptions options() const { return layout_.options(); }
  int size() const { return layout_.size(); }
  DeviceArray array(int rank, Values values) { return {gpu_, rank % 2, std::move(values)}; }
  Operation allreduce(const DeviceArray& input, const DeviceArray& output, ReduceOp op = ReduceOp::kSum) {
    Operation made = allreduce_of(input, output, devices_);
    made.descriptor.key.order = Order::kAny;
    made.descriptor.key.op = op;
    return made;
  }
  Values sum_of_all(std::size_t count) const {
    Values sum(count, 0);
    for (int rank = 0; rank < size(); ++rank) {
      const Values theirs = values_of(rank, count);
      for (std::size_t i = 0; i < count; ++i) sum[i] += theirs[i];
    }
    return sum;
  }
  /// Whether NCCL has communicators, so many of them.
  bool uses_nccl(std::size_t wanted) const {
    std::size_t found = 0;
    for (const auto& each : std::filesystem::directory_iterator(folder_.path()))
      found += each.path().string().ends_with(".init.0") ? 1 : 0;
    EXPECT_TRUE(found == 0 || found == wanted) << found;
    return found > 0;
  }
  bool are_hosts_alike() const {
    return layout_.ranks.front() > 1 && layout_.ranks.front() == layout_.ranks.back();
  }

  const Layout layout_;
  const NcclFolder folder_;
  FakeGpu gpu_;
  std::shared_ptr<Devices> devices_ = std::make_shared<Devices>(gpu_.driver());
  RankGroup group_;
};

TEST_P(DeviceNcclHostsTest, SumsOfWholeArrays) {
  group_.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, kCount, std::size_t{70'004}})
      for (const CallMode mode : kCallModes) {
        const DeviceArray x = array(rank, values_of(rank, count));
        const DeviceArray out = array(rank, Values(count, -1));
        perform(communicator, allreduce(x, out), mode);
        EXPECT_EQ(out.seen(), sum_of_all(count)) << count;
        EXPECT_EQ(x.seen(), values_of(rank, count));
        perform(communicator, allreduce(x, x), mode);
        EXPECT_EQ(x.seen(), sum_of_all(count)) << count << " in place";
      }
    run(communicator, barrier_operation());
    EXPECT_EQ(uses_nccl(layout_.ranks.size()), are_hosts_alike());
  });
}

TEST_P(DeviceNcclHostsTest, Averages) {
  group_.run([&](Communicator& communicator) {
    const DeviceArray x = array(communicator.rank(), Values(kCount, static_cast<float>(size())));
    run(communicator, allreduce(x, x, ReduceOp::kAverage));
    EXPECT_EQ(x.seen(), Values(kCount, static_cast<float>(size())));
  });
}

TEST_P(DeviceNcclHostsTest, SumsOfPieces) {
  group_.run([&](Communicator& communicator) {
    for (const CallMode mode : kCallModes) {
      Bucket bucket(gpu_, communicator.rank() % 2, kPieces, static_cast<float>(communicator.rank() + 1));
      float wanted = static_cast<float>(size() * (size() + 1)) / 2;
      for (int times = 0; times < 3; ++times) {
        if (times > 0) wanted *= static_cast<float>(size());
        perform(communicator, bucket.operation(devices_), mode);
        bucket.expect(wanted);
      }
    }
    run(communicator, barrier_operation());
    EXPECT_EQ(uses_nccl(layout_.ranks.size()), are_hosts_alike());
  });
}

TEST_P(DeviceNcclHostsTest, AnArrayOnTheHostOfOneRank) {
  for (int odd = 0; odd < size(); ++odd)
    group_.run([&](Communicator& communicator) {
      const int rank = communicator.rank();
      const DeviceArray x = array(rank, Values(kCount, 1));
      Values on_host(kCount, 1);
      Operation sum = sum_in_place(on_host);
      sum.descriptor.key.order = Order::kAny;
      run(communicator, rank == odd ? std::move(sum) : allreduce(x, x));
      EXPECT_EQ(rank == odd ? on_host : x.seen(), Values(kCount, static_cast<float>(size())));
      const DeviceArray y = array(rank, Values(kCount, 1));
      run(communicator, allreduce(y, y));
      EXPECT_EQ(y.seen(), Values(kCount, static_cast<float>(size())));
    });
}

TEST_P(DeviceNcclHostsTest, OtherCollectivesPassThroughTheHost) {
  GroupOptions any_order = options();
  any_order.communicator.order = Order::kAny;
  RankGroup(any_order).run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const DeviceArray x = array(rank, values_of(rank, kCount));
    const Request request{.kind = OpKind::kBroadcast, .rows = kCount, .root = size() - 1};
    run(communicator, on_devices(make_operation(request), devices_, &x, &x));
    EXPECT_EQ(x.seen(), values_of(size() - 1, kCount));
    EXPECT_FALSE(uses_nccl(layout_.ranks.size()));
  });
}

// What crosses goes from neighbour to neighbour; NCCL itself would have to reach all hosts.
TEST_P(DeviceNcclHostsTest, HostsThatReachTheirNeighboursAlone) {
  for (const NcclScope scope : {NcclScope::kAll, NcclScope::kHierarchical}) {
    GroupOptions line = options();
    line.transport = TransportKind::kClusterLine;
    line.communicator.nccl = scope;
    RankGroup(line).run([&](Communicator& communicator) {
      const int rank = communicator.rank();
      const DeviceArray x = array(rank, values_of(rank, kCount));
      run(communicator, allreduce(x, x));
      EXPECT_EQ(x.seen(), sum_of_all(kCount));
      run(communicator, barrier_operation());
      const bool by_nccl = scope == NcclScope::kHierarchical ? are_hosts_alike() : layout_.ranks.size() == 2;
      EXPECT_EQ(uses_nccl(scope == NcclScope::kHierarchical ? layout_.ranks.size() : 1), by_nccl);
    });
  }
}

TEST_P(DeviceNcclHostsTest, FailuresOfAnOperation) {
  if (!are_hosts_alike()) GTEST_SKIP() << "NCCL is not asked";
  ::setenv("FAKE_NCCL", "fail=operation", 1);
  const auto outcomes = group_.outcomes([&](Communicator& communicator) {
    const DeviceArray x = array(communicator.rank(), Values(kCount, 1));
    run(communicator, allreduce(x, x));
  });
  expect_all_raised(outcomes, ErrorKind::kInternal, "an operation of NCCL");
}

// On one rank, when all have reduced within their hosts; and when they have across hosts.
TEST_P(DeviceNcclHostsTest, CopiesThatFail) {
  if (!are_hosts_alike()) GTEST_SKIP() << "there is no copy of a share";
  for (const char* const copy : {"copy_to_host", "copy_to_device"}) {
    gpu_.fail_next(copy, cuda::kIllegalAddress);
    const auto outcomes = RankGroup(options()).outcomes([&](Communicator& communicator) {
      const DeviceArray x = array(communicator.rank(), Values(kCount, 1));
      run(communicator, allreduce(x, x));
    });
    expect_all_raised(outcomes, ErrorKind::kInternal, "cuMemcpy");
  }
}

const auto kLayouts =
    ::testing::ValuesIn(fewer_if_sanitized<std::vector<int>>({{3, 3}, {2, 1}}, {{2, 2}, {2, 2, 2}}));
INSTANTIATE_TEST_SUITE_P(
    Orders, DeviceNcclHostsTest,
    ::testing::Combine(::testing::Values(Progress::kLate, Progress::kSeeded, Progress::kThreads), kLayouts));

/// How what NCCL has reduced within hosts crosses them.
struct Crossing {
  std::vector<int> ranks;
  TransportKind transport;
  const char* tuning;
};
void PrintTo(const Crossing& crossing, std::ostream* out) {
  *out << transport_name(crossing.transport) << " " << crossing.tuning;
}

class DeviceNcclCrossingTest : public ::testing::TestWithParam<Crossing> {
 protected:
  static constexpr std::size_t kCount = 30'001;

  DeviceNcclCrossingTest() { ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1); }

  GroupOptions options() const {
    GroupOptions made = Layout{GetParam().ranks, NcclScope::kHierarchical}.options();
    made.transport = GetParam().transport;
    made.communicator.tuning = GetParam().tuning;
    return made;
  }
  /// The allreduce of a problem, in place.
  Bytes reduced(Communicator& communicator, const ReduceProblem& problem, CallMode mode,
                CommDtype comm_dtype = CommDtype::kDefault) {
    const DeviceBytes x(gpu_, problem.input(communicator.rank()));
    Operation made = reduction_of(problem, nullptr, nullptr);
    made.descriptor.key.order = Order::kAny;
    made.descriptor.key.comm_dtype = comm_dtype;
    made.on_devices = std::make_unique<DeviceArrays>();
    made.on_devices->devices = devices_;
    made.on_devices->input = made.on_devices->output = x.buffer();
    made.input = made.output = x.buffer().address;
    made.output_bytes = x.buffer().bytes;
    perform(communicator, made, mode);
    return x.seen();
  }
  /// Its bits if any order of additions gives the same.
  void expect_reduced(Communicator& communicator, const ReduceProblem& problem, CallMode mode) {
    EXPECT_TRUE(reduced(communicator, problem, mode) == problem.expected) << problem.text();
  }

  const NcclFolder folder_;
  FakeGpu gpu_;
  std::shared_ptr<Devices> devices_ = std::make_shared<Devices>(gpu_.driver());
};

TEST_P(DeviceNcclCrossingTest, EveryKindOfNumber) {
  RankGroup group(options());
  group.run([&](Communicator& communicator) {
    for (const CallMode mode : kCallModes)
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt32})
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
          if (op == ReduceOp::kMax && dtype != DType::kInt32) continue;  // not NCCL's
          const std::size_t count = 4 * kCount / dtype_size(dtype);
          expect_reduced(communicator, exact_problem(dtype, {op}, count, communicator.size()), mode);
        }
  });
  // What each rank has of a host's sums, and nothing else: once in each operation.
  EXPECT_EQ(gpu_.calls("copy_to_host"), 2 * 5 * group.size());
}

/// Of integers that are exact in float32 however many ranks add them, and in no half precision.
ReduceProblem inexact_in_half(ReduceOp op, std::size_t count, int size) {
  ReduceProblem problem{DType::kFloat32, {op}, count, {}, Bytes(count * sizeof(float))};
  for (int rank = 0; rank < size; ++rank) {
    Values values(kPeriod);
    for (std::size_t i = 0; i < kPeriod; ++i) values[i] = static_cast<float>(5 * i + 7 * rank);
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(values.data());
    problem.inputs.push_back(repeated({bytes, bytes + kPeriod * sizeof(float)}, problem.bytes()));
  }
  return problem;
}

// Each host's sum is, and the result; nothing is within a host. No rule of a tuning is followed.
TEST_P(DeviceNcclCrossingTest, IsRoundedByCommDtype) {
  RankGroup group(options());
  for (const CommDtype comm_dtype : {CommDtype::kBFloat16, CommDtype::kFloat16})
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage})
      for (const std::size_t count : {kCount, kCount + 1}) {
        if (op == ReduceOp::kAverage && GetParam().ranks.size() != 2) continue;  // a third is rounded, too
        const ReduceProblem problem = inexact_in_half(op, count, options().size);
        group.run([&](Communicator& communicator) {
          const Bytes expected = comm_dtype_oracle(comm_dtype, problem, communicator.hosts());
          EXPECT_TRUE(reduced(communicator, problem, CallMode::kSync, comm_dtype) == expected)
              << problem.text() << " " << comm_dtype_name(comm_dtype);
          EXPECT_FALSE(std::filesystem::is_empty(folder_.path())) << "not by NCCL within hosts";
        });
      }
}

// The first rank of each host is in none, and ranks have other numbers.
TEST_P(DeviceNcclCrossingTest, AGroupOfAPartOfEachHost) {
  GroupOptions larger = options();
  for (int& ranks : larger.layout) ++ranks;
  larger.size += static_cast<int>(larger.layout.size());
  larger.communicator.tuning.clear();
  std::vector<int> first{0};
  for (const int ranks : larger.layout) first.push_back(first.back() + ranks);
  RankGroup(larger).run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const bool is_first = std::ranges::find(first, rank) != first.end();
    const auto part = communicator.split(is_first ? 1 : 0, -rank, {});
    if (is_first) return;
    for (const CallMode mode : kCallModes)
      expect_reduced(*part, exact_problem(DType::kFloat32, {ReduceOp::kSum}, kCount, part->size()), mode);
  });
  EXPECT_EQ(gpu_.calls("copy_to_host"), 2 * options().size);
}

TEST_P(DeviceNcclCrossingTest, AModeLeavesNothingToNccl) {
  GroupOptions forced = options();
  forced.communicator.tuning.clear();
  forced.communicator.mode = "2x" + std::to_string(forced.layout.size()) + "p";
  RankGroup(forced).run([&](Communicator& communicator) {
    expect_reduced(communicator,
                   exact_problem(DType::kFloat32, {ReduceOp::kSum}, kCount, communicator.size()),
                   CallMode::kSync);
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

INSTANTIATE_TEST_SUITE_P(Crossings, DeviceNcclCrossingTest,
                         ::testing::Values(Crossing{{2, 2}, TransportKind::kClusterMpi, ""},
                                           Crossing{{2, 2, 2}, TransportKind::kClusterRelayed, ""},
                                           Crossing{{2, 2, 2}, TransportKind::kCluster, "0- 2x3r"},
                                           Crossing{{2, 2}, TransportKind::kCluster, "0- 2x2t"}));

/// A setting that asks for NCCL on several hosts, and what rank 0 says of it; null: nothing.
struct Asked {
  Layout layout;
  void (*set)(GroupOptions& options);
  const char* said;
};
void PrintTo(const Asked& asked, std::ostream* out) { *out << (asked.said == nullptr ? "none" : asked.said); }

class NcclScopeTest : public ::testing::TestWithParam<Asked> {};

TEST_P(NcclScopeTest, RankZeroSaysWhatHasNoEffect) {
  const auto& [layout, set, said] = GetParam();
  GroupOptions options = layout.options();
  options.communicator.order = Order::kAny;
  set(options);
  std::vector<std::string> warnings;
  options.communicator.warn = [&](const std::string& text) { warnings.push_back(text); };
  RankGroup(options).run([](Communicator& communicator) { communicator.split(0, 0, {}); });
  ASSERT_EQ(warnings.size(), said == nullptr ? 0U : 1U);
  if (said != nullptr) expect_text(warnings[0], said);
}

constexpr auto kHierarchical = NcclScope::kHierarchical;
constexpr auto kLeave = [](GroupOptions&) {};
INSTANTIATE_TEST_SUITE_P(
    Settings, NcclScopeTest,
    ::testing::Values(
        Asked{{{2, 2}, kHierarchical}, kLeave, nullptr}, Asked{{{1, 2}}, kLeave, nullptr},
        Asked{{{2, 2}, kHierarchical},
              [](GroupOptions& options) { options.communicator.comm_dtype = CommDtype::kBFloat16; },
              nullptr},
        Asked{{{2, 1}, kHierarchical}, kLeave, "MULTIRING_NCCL=hierarchical has no effect here: all hosts"},
        Asked{{{1, 1}, kHierarchical}, kLeave, "as many ranks, at least two"},
        Asked{{{2, 2}, kHierarchical},
              [](GroupOptions& options) { options.communicator.mode = "2x2"; },
              "has no effect with a mode"},
        Asked{{{2, 2}},
              [](GroupOptions& options) { options.communicator.order = Order::kCanonical; },
              "MULTIRING_NCCL=all is for calls that allow any order only"},
        Asked{{{2, 2}},
              [](GroupOptions& options) { options.communicator.comm_dtype = CommDtype::kBFloat16; },
              "unset MULTIRING_COMM_DTYPE"},
        Asked{{{1, 1, 1, 1}},
              [](GroupOptions& options) { options.transport = TransportKind::kClusterLine; },
              "where hosts reach their neighbours alone"},
        Asked{{{4}, kHierarchical}, kLeave, nullptr}));

}  // namespace
}  // namespace multiring
