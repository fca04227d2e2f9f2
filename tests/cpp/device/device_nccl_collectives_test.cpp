// Collectives by NCCL, on the stand-ins for it and for the driver: ranks as threads, on two devices that they
// share, on one host or on several.

#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "support/device_array.h"
#include "support/errors.h"
#include "support/nccl_folder.h"
#include "support/sanitizer.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

using namespace testing;

using Values = std::vector<float>;

/// What a rank has, from element `begin` on; sums of it are exact.
Values values_of(int rank, std::size_t count, std::size_t begin = 0) {
  Values values(count);
  for (std::size_t i = 0; i < count; ++i)
    values[i] = static_cast<float>((begin + i) % 97) + 100 * static_cast<float>(rank);
  return values;
}

void add(Values& to, const Values& more) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += more[i];
}

void append(Values& to, const Values& more) { to.insert(to.end(), more.begin(), more.end()); }

class DeviceNcclCollectivesTest : public ::testing::TestWithParam<std::tuple<Progress, Layout>> {
 protected:
  /// Nothing, too little for NCCL, and what lies on both sides of a segment of staging memory.
  static constexpr std::size_t kCounts[] = {0, 1, 16'384, 70'003};

  DeviceNcclCollectivesTest() : layout_(std::get<1>(GetParam())), size_(layout_.size()), group_(options()) {
    ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    gpu_.set_progress(std::get<0>(GetParam()), 3);
  }

  GroupOptions options(Order order = Order::kAny) const {
    GroupOptions made = layout_.options();
    made.communicator.order = order;
    return made;
  }
  int copies() { return gpu_.calls("copy_to_host"); }
  bool is_large(std::size_t count) const { return size_ > 1 && count >= 16'384; }
  DeviceArray array(int rank, Values values) { return {gpu_, rank % 2, std::move(values)}; }
  Operation operation(Request request, const DeviceArray& input, const DeviceArray* output = nullptr) {
    if (request.rows == 0) request.rows = input.bytes() / sizeof(float);
    Operation made = on_devices(make_operation(request), devices_, &input, output);
    made.splits = request.splits;
    if (request.kind == OpKind::kAllreduce || request.kind == OpKind::kReduceScatter)
      made.descriptor.key.order = Order::kAny;
    return made;
  }
  /// What the operation has allocated, as a kernel sees it that another stream is given now.
  Values result_of(const Operation& operation, const DeviceArray& near) {
    Values seen(operation.result.bytes() / sizeof(float));
    const auto* const from = reinterpret_cast<const float*>(gpu_.view(operation.result.data()));
    gpu_.launch(near.buffer().stream, [&] { seen.assign(from, from + seen.size()); });
    gpu_.synchronize(near.buffer().stream);
    EXPECT_TRUE(operation.result.buffer().on_device() || seen.empty());
    EXPECT_TRUE(seen.empty() || operation.result.buffer().device == near.buffer().device);
    return seen;
  }
  /// A collective of `own` gives what is wanted: in an array of the program's, and in the one of the result.
  Operation expect(Communicator& communicator, CallMode mode, OpKind kind, const Values& own,
                   const Values& wanted) {
    const DeviceArray x = array(communicator.rank(), own);
    const DeviceArray out = array(communicator.rank(), Values(wanted.size(), -1));
    perform(communicator, operation({.kind = kind}, x, &out), mode);
    EXPECT_EQ(out.seen(), wanted) << own.size();
    Operation done = perform(communicator, operation({.kind = kind}, x), mode);
    EXPECT_EQ(result_of(done, x), wanted) << own.size();
    EXPECT_EQ(x.seen(), own);
    return done;
  }
  /// Runs `body` on all ranks, for each way to call; of ranks that have so many elements NCCL copies none.
  void run_on_all(std::size_t count, const std::function<void(Communicator&, CallMode)>& body) {
    const int before = copies();
    group_.run([&](Communicator& communicator) {
      for (const CallMode mode : kCallModes) body(communicator, mode);
    });
    if (is_large(count)) {
      EXPECT_EQ(copies(), before);
    }
  }

  const Layout layout_;
  const int size_;
  const NcclFolder folder_;
  FakeGpu gpu_;
  std::shared_ptr<Devices> devices_ = std::make_shared<Devices>(gpu_.driver());
  RankGroup group_;
};

TEST_P(DeviceNcclCollectivesTest, Allreduce) {
  for (const std::size_t count : kCounts)
    run_on_all(count, [&](Communicator& communicator, CallMode mode) {
      const int rank = communicator.rank();
      Values wanted(count, 0);
      for (int each = 0; each < size_; ++each) add(wanted, values_of(each, count));
      const DeviceArray x = array(rank, values_of(rank, count));
      const DeviceArray out = array(rank, Values(count, -1));
      perform(communicator, operation({}, x, &out), mode);
      EXPECT_EQ(out.seen(), wanted) << count;
      EXPECT_EQ(x.seen(), values_of(rank, count));
      perform(communicator, operation({}, x, &x), mode);
      EXPECT_EQ(x.seen(), wanted) << count << " in place";
    });
}

TEST_P(DeviceNcclCollectivesTest, Broadcast) {
  for (const std::size_t count : kCounts)
    for (const int root : {0, size_ - 1})
      run_on_all(count, [&](Communicator& communicator, CallMode mode) {
        const int rank = communicator.rank();
        const DeviceArray x = array(rank, values_of(rank, count));
        const DeviceArray out = array(rank, Values(count, -1));
        const Request request{.kind = OpKind::kBroadcast, .root = root};
        perform(communicator, operation(request, x, &out), mode);
        EXPECT_EQ(out.seen(), values_of(root, count)) << count << " from " << root;
        EXPECT_EQ(x.seen(), values_of(rank, count));
        perform(communicator, operation(request, x, &x), mode);
        EXPECT_EQ(x.seen(), values_of(root, count)) << count << " in place";
      });
}

// It moves bytes, whatever they are.
TEST_P(DeviceNcclCollectivesTest, DtypesThatNcclLacks) {
  for (const DType dtype : {DType::kBool, DType::kInt16, DType::kUInt16})
    run_on_all(20'000, [&](Communicator& communicator, CallMode mode) {
      const int rank = communicator.rank();
      const DeviceArray x = array(rank, values_of(rank, 20'000));
      const Request request{
          .kind = OpKind::kBroadcast, .dtype = dtype, .rows = 80'000 / dtype_size(dtype), .root = size_ - 1};
      perform(communicator, operation(request, x, &x), mode);
      EXPECT_EQ(x.seen(), values_of(size_ - 1, 20'000));
    });
}

TEST_P(DeviceNcclCollectivesTest, Allgather) {
  for (const std::size_t count : kCounts)
    run_on_all(count, [&](Communicator& communicator, CallMode mode) {
      const int rank = communicator.rank();
      Values wanted;
      for (int each = 0; each < size_; ++each) append(wanted, values_of(each, count));
      const Operation done = expect(communicator, mode, OpKind::kAllgather, values_of(rank, count), wanted);
      EXPECT_EQ(done.received, std::vector<std::uint64_t>(static_cast<std::size_t>(size_), count));
    });
}

// Passes through the host.
TEST_P(DeviceNcclCollectivesTest, AllgatherInPlace) {
  constexpr std::size_t kCount = 20'001;
  run_on_all(0, [&](Communicator& communicator, CallMode mode) {
    const int rank = communicator.rank();
    Values mine(kCount * static_cast<std::size_t>(size_), -1);
    Values wanted;
    for (int each = 0; each < size_; ++each) append(wanted, values_of(each, kCount));
    const Values own = values_of(rank, kCount);
    const std::size_t begin = kCount * static_cast<std::size_t>(rank);
    std::copy(own.begin(), own.end(), mine.begin() + static_cast<std::ptrdiff_t>(begin));
    const DeviceArray out = array(rank, mine);
    Operation made = operation({.kind = OpKind::kAllgather, .rows = kCount}, out, &out);
    Buffer& input = made.on_devices->input;
    input.address += begin * sizeof(float);
    input.bytes = kCount * sizeof(float);
    made.input = input.address;
    perform(communicator, std::move(made), mode);
    EXPECT_EQ(out.seen(), wanted);
  });
  EXPECT_GE(copies(), 2 * size_);
}

/// Of rank 1 many more, and of the last one fewer than NCCL would be taken for.
std::size_t rows_of(int rank) { return rank == 0 ? 7 : rank == 1 ? 50'001 : 20'000 + 10 * std::size_t(rank); }

TEST_P(DeviceNcclCollectivesTest, AllgatherOfUnequalRows) {
  run_on_all(0, [&](Communicator& communicator, CallMode mode) {
    const int rank = communicator.rank();
    Values wanted;
    std::vector<std::uint64_t> rows;
    for (int each = 0; each < size_; ++each) {
      append(wanted, values_of(each, rows_of(each)));
      rows.push_back(rows_of(each));
    }
    const DeviceArray x = array(rank, values_of(rank, rows_of(rank)));
    const Operation done = perform(communicator, operation({.kind = OpKind::kAllgather}, x), mode);
    EXPECT_EQ(result_of(done, x), wanted);
    EXPECT_EQ(done.received, rows);
  });
  // Rank 0 copies its few rows, before it knows of the others', in each way to call.
  if (size_ > 1) {
    EXPECT_EQ(copies(), 2);
  }
}

// The root alone has a result. Rank 0 has few rows, which it copies before it knows of the others'.
TEST_P(DeviceNcclCollectivesTest, Gather) {
  const int root = size_ - 1;
  const int before = copies();
  run_on_all(0, [&](Communicator& communicator, CallMode mode) {
    const int rank = communicator.rank();
    Values wanted;
    for (int each = 0; each < size_; ++each) append(wanted, values_of(each, rows_of(each)));
    const DeviceArray x = array(rank, values_of(rank, rows_of(rank)));
    const DeviceArray out = array(rank, Values(wanted.size(), -1));
    const Request request{.kind = OpKind::kGather, .root = root};
    perform(communicator, operation(request, x, rank == root ? &out : nullptr), mode);
    const Operation done = perform(communicator, operation(request, x), mode);
    EXPECT_EQ(x.seen(), values_of(rank, rows_of(rank)));
    if (rank != root) return;
    EXPECT_EQ(out.seen(), wanted);
    EXPECT_EQ(result_of(done, x), wanted);
  });
  if (size_ > 1) {
    EXPECT_EQ(copies(), before + 4);
  }
}

TEST_P(DeviceNcclCollectivesTest, ReduceScatter) {
  for (const std::size_t count : kCounts) {
    const Range whole{0, count};
    run_on_all(count, [&](Communicator& communicator, CallMode mode) {
      const int rank = communicator.rank();
      const Range block =
          block_range(whole.size(), static_cast<std::size_t>(size_), static_cast<std::size_t>(rank));
      Values wanted(block.size(), 0);
      for (int each = 0; each < size_; ++each) add(wanted, values_of(each, block.size(), block.begin));
      expect(communicator, mode, OpKind::kReduceScatter, values_of(rank, count), wanted);
    });
  }
}

TEST_P(DeviceNcclCollectivesTest, ReduceScatterInCanonicalOrder) {
  group_.run([&](Communicator& communicator) {
    const DeviceArray x = array(communicator.rank(), Values(20'000, 1));
    Operation made = operation({.kind = OpKind::kReduceScatter}, x);
    made.descriptor.key.order = Order::kCanonical;
    const Operation done = perform(communicator, std::move(made));
    EXPECT_EQ(result_of(done, x), Values(done.result.bytes() / sizeof(float), static_cast<float>(size_)));
  });
  EXPECT_GE(copies(), size_);
}

TEST_P(DeviceNcclCollectivesTest, JobsInCanonicalOrderMoveNothingByNccl) {
  RankGroup group(options(Order::kCanonical));
  group.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const DeviceArray x = array(rank, values_of(rank, 20'000));
    const Operation done = perform(communicator, operation({.kind = OpKind::kAllgather}, x));
    Values wanted;
    for (int peer = 0; peer < size_; ++peer) append(wanted, values_of(peer, 20'000));
    EXPECT_EQ(result_of(done, x), wanted);
  });
  EXPECT_GE(copies(), size_);
}

/// Rows that rank `from` has for rank `to`: none for some.
std::uint64_t rows_for(int from, int to, std::size_t count) {
  return (from + to) % 3 == 2 ? 0 : count + static_cast<std::uint64_t>(10 * from + to);
}

TEST_P(DeviceNcclCollectivesTest, Alltoall) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{16'385}, std::size_t{100'003}})
    run_on_all(count, [&](Communicator& communicator, CallMode mode) {
      const int rank = communicator.rank();
      Request request{.kind = OpKind::kAlltoall};
      Values wanted;
      std::vector<std::uint64_t> received;
      for (int peer = 0; peer < size_; ++peer) {
        request.splits.push_back(rows_for(rank, peer, count));
        received.push_back(rows_for(peer, rank, count));
        std::size_t begin = 0;
        for (int before = 0; before < rank; ++before) begin += rows_for(peer, before, count);
        append(wanted, values_of(peer, rows_for(peer, rank, count), begin));
      }
      const auto total = std::accumulate(request.splits.begin(), request.splits.end(), std::uint64_t{0});
      const DeviceArray x = array(rank, values_of(rank, total));
      const DeviceArray out = array(rank, Values(wanted.size(), -1));
      perform(communicator, operation(request, x, &out), mode);
      EXPECT_EQ(out.seen(), wanted) << count;
      const Operation done = perform(communicator, operation(request, x), mode);
      EXPECT_EQ(result_of(done, x), wanted) << count;
      EXPECT_EQ(done.received, received);
    });
}

class DeviceNcclAgreementTest : public DeviceNcclCollectivesTest {
 protected:
  static constexpr std::size_t kCount = 20'000;

  std::size_t rows_to(int rank) const {
    return block_range(kCount, static_cast<std::size_t>(size_), static_cast<std::size_t>(rank)).size();
  }
  /// One of these, from an array to where the collective allocates it, or in place.
  Operation made(OpKind kind, const DeviceArray& x) {
    Request request{.kind = kind};
    if (kind == OpKind::kBroadcast || kind == OpKind::kGather) request.root = 0;
    if (kind == OpKind::kAlltoall)
      for (int rank = 0; rank < size_; ++rank) request.splits.push_back(rows_to(rank));
    return operation(request, x, kind == OpKind::kBroadcast ? &x : nullptr);
  }
  static Operation on_host(Operation operation, Values& x) {
    operation.on_devices = nullptr;
    operation.input = reinterpret_cast<const std::byte*>(x.data());
    if (operation.output != nullptr) operation.output = reinterpret_cast<std::byte*>(x.data());
    return operation;
  }
  /// Of ranks that have ones.
  void expect_ones(OpKind kind, int rank, const Values& seen) const {
    const float one = kind == OpKind::kReduceScatter ? static_cast<float>(size_) : 1;
    EXPECT_EQ(seen, Values(seen.size(), one));
    if (kind == OpKind::kGather && rank > 0) {
      EXPECT_TRUE(seen.empty());
    } else {
      EXPECT_GE(seen.size(), kCount / static_cast<std::size_t>(size_));
    }
  }
};

constexpr OpKind kKinds[] = {OpKind::kBroadcast, OpKind::kAllgather, OpKind::kReduceScatter,
                             OpKind::kAlltoall, OpKind::kGather};

TEST_P(DeviceNcclAgreementTest, AnArrayOnTheHostOfOneRank) {
  for (const OpKind kind : kKinds)
    for (int odd = 0; odd < size_; ++odd)
      for (const CallMode mode : kCallModes)
        group_.run([&](Communicator& communicator) {
          const int rank = communicator.rank();
          const DeviceArray x =
              array(rank, Values(kCount, kind == OpKind::kBroadcast && rank > 0 ? -1.0F : 1));
          Values host = x.seen();
          const bool is_odd = rank == odd;
          Operation asked = is_odd ? on_host(made(kind, x), host) : made(kind, x);
          Operation done = perform(communicator, std::move(asked), mode);
          if (kind == OpKind::kBroadcast)
            expect_ones(kind, rank, is_odd ? host : x.seen());
          else if (!is_odd)
            expect_ones(kind, rank, result_of(done, x));
          // The next one, which NCCL may have, is right as well.
          done = perform(communicator, made(kind, x), mode);
          expect_ones(kind, rank, kind == OpKind::kBroadcast ? x.seen() : result_of(done, x));
        });
}

// All see it before NCCL has begun, which those whose own output fits would else wait in.
TEST_P(DeviceNcclAgreementTest, AnOutputThatDoesNotFit) {
  if (size_ == 1) GTEST_SKIP() << "one rank has no peers";
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kAlltoall}) {
    RankGroup group(options());
    const auto outcomes = group.outcomes([&](Communicator& communicator) {
      const int rank = communicator.rank();
      const DeviceArray x = array(rank, Values(kCount, 1));
      run(communicator, made(kind, x));  // NCCL is connected
      const std::size_t each = kind == OpKind::kAllgather ? kCount : rows_to(rank);
      const DeviceArray out = array(rank, Values(each * static_cast<std::size_t>(size_) - (rank == 1), -1));
      Operation asked = made(kind, x);
      run(communicator, operation({.kind = kind, .splits = asked.splits}, x, &out));
    });
    expect_all_raised(outcomes, ErrorKind::kMismatch, "rank 1: out of");
  }
}

TEST_P(DeviceNcclAgreementTest, FailuresOfAnOperation) {
  if (size_ == 1) GTEST_SKIP() << "one rank has no peers";
  for (const OpKind kind : kKinds) {
    RankGroup group(options());
    ::setenv("FAKE_NCCL", "fail=operation", 1);
    const auto outcomes = group.outcomes([&](Communicator& communicator) {
      const DeviceArray x = array(communicator.rank(), Values(kCount, 1));
      perform(communicator, made(kind, x));
    });
    expect_all_raised(outcomes, ErrorKind::kInternal, "an operation of NCCL");
    ::unsetenv("FAKE_NCCL");
  }
  EXPECT_EQ(copies(), 0);
}

const auto kAll = ::testing::Combine(
    ::testing::Values(Progress::kLate, Progress::kSeeded, Progress::kThreads),
    ::testing::ValuesIn(fewer_if_sanitized<Layout>({{{1}}, {{3}}, {{2, 1}}}, {{{2}}, {{2, 2}}})));
INSTANTIATE_TEST_SUITE_P(Orders, DeviceNcclCollectivesTest, kAll);
INSTANTIATE_TEST_SUITE_P(Orders, DeviceNcclAgreementTest, kAll);

}  // namespace
}  // namespace multiring
