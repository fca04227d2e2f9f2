// The collectives that move or split rows, each in its synchronous and asynchronous form.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <vector>

#include "support/operations.h"
#include "support/oracles/problem.h"
#include "support/oracles/reduce_oracle.h"
#include "support/rank_group.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

using namespace testing;

/// How many rows each rank has: the same number, or unequal ones, none for some.
struct Rows {
  std::uint64_t base;
  std::uint64_t step;
  std::uint64_t of(std::size_t rank) const { return base + step * ((rank * 3 + 1) % 4); }
};
// With the rows below: nothing at all, one element a rank, odd numbers, several segments.
constexpr Rows kRows[] = {{0, 0}, {1, 0}, {0, 1}, {5, 0}, {0, 37}, {3, 400}};
constexpr std::uint64_t kRowElements[] = {1, 3};

Bytes input_of(DType dtype, std::uint64_t elements, std::size_t rank) {
  return periodic_elements(dtype, elements, static_cast<std::uint32_t>(rank * 7 + elements), false);
}

Bytes slice(const Bytes& bytes, std::size_t begin, std::size_t end) {
  return {bytes.begin() + static_cast<std::ptrdiff_t>(begin),
          bytes.begin() + static_cast<std::ptrdiff_t>(end)};
}

void append(Bytes& to, const Bytes& more) { to.insert(to.end(), more.begin(), more.end()); }

class CollectivesTest : public GroupTest {
 protected:
  std::size_t size() const { return static_cast<std::size_t>(group_.size()); }

  /// Runs `body` on all ranks for every dtype, mode, number of rows and length of a row.
  template <class Body>
  void for_each_case(const Body& body) {
    group_.run([&](Communicator& communicator) {
      for (const DType dtype : kAllDTypes)
        for (const Rows& rows : kRows)
          for (const std::uint64_t row : kRowElements)
            for (const CallMode mode : kCallModes) {
              const ::testing::ScopedTrace trace(__FILE__, __LINE__,
                                                 std::string(dtype_name(dtype)) + " rows of " +
                                                     std::to_string(row) + ", " + std::to_string(rows.base) +
                                                     " + " + std::to_string(rows.step) + " x rank");
              body(communicator, dtype, rows, row, mode);
            }
    });
  }
};

std::vector<std::uint64_t> rows_of_all(const Rows& rows, std::size_t size) {
  std::vector<std::uint64_t> all;
  for (std::size_t rank = 0; rank < size; ++rank) all.push_back(rows.of(rank));
  return all;
}

Bytes joined(DType dtype, const Rows& rows, std::uint64_t row, std::size_t size) {
  Bytes all;
  for (std::size_t rank = 0; rank < size; ++rank) append(all, input_of(dtype, rows.of(rank) * row, rank));
  return all;
}

TEST_P(CollectivesTest, AllgatherOfUnequalLengths) {
  for_each_case(
      [&](Communicator& communicator, DType dtype, const Rows& rows, std::uint64_t row, CallMode mode) {
        const auto rank = static_cast<std::size_t>(communicator.rank());
        const Bytes input = input_of(dtype, rows.of(rank) * row, rank);
        const Bytes expected = joined(dtype, rows, row, size());
        Request request{.kind = OpKind::kAllgather, .dtype = dtype, .rows = rows.of(rank), .row = row};
        request.input = input.data();
        Operation operation = perform(communicator, request, mode);
        EXPECT_EQ(result_of(operation), expected);
        EXPECT_EQ(operation.received, rows_of_all(rows, size()));
        // Into memory of the caller's, with the input in its place there.
        Bytes output(expected.size(), 0xcd);
        std::size_t begin = 0;
        for (std::size_t peer = 0; peer < rank; ++peer) begin += rows.of(peer) * row * dtype_size(dtype);
        std::copy(input.begin(), input.end(), output.begin() + static_cast<std::ptrdiff_t>(begin));
        request.input = output.data() + begin;
        request.output = output.data();
        request.output_bytes = output.size();
        operation = perform(communicator, request, mode);
        EXPECT_EQ(output, expected);
      });
}

TEST_P(CollectivesTest, GatherOfUnequalLengths) {
  for_each_case([&](Communicator& communicator, DType dtype, const Rows& rows, std::uint64_t row,
                    CallMode mode) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    const auto root = static_cast<int>((rows.step + row) % size());
    const Bytes input = input_of(dtype, rows.of(rank) * row, rank);
    Request request{.kind = OpKind::kGather, .dtype = dtype, .rows = rows.of(rank), .row = row, .root = root};
    request.input = input.data();
    Operation operation = perform(communicator, request, mode);
    if (communicator.rank() == root) {
      EXPECT_EQ(result_of(operation), joined(dtype, rows, row, size()));
      EXPECT_EQ(operation.received, rows_of_all(rows, size()));
    } else {
      EXPECT_EQ(operation.output, nullptr);
    }
  });
}

TEST_P(CollectivesTest, BroadcastInPlaceAndOutOfPlace) {
  for_each_case(
      [&](Communicator& communicator, DType dtype, const Rows& rows, std::uint64_t row, CallMode mode) {
        const auto root = static_cast<int>((rows.base + row) % size());
        const std::uint64_t count = rows.of(0);
        const Bytes expected = input_of(dtype, count * row, static_cast<std::size_t>(root));
        const bool is_root = communicator.rank() == root;
        Bytes array = is_root ? expected : Bytes(expected.size(), 0xcd);
        Request request{.kind = OpKind::kBroadcast, .dtype = dtype, .rows = count, .row = row, .root = root};
        request.input = request.output = array.data();
        Operation operation = perform(communicator, request, mode);
        EXPECT_EQ(array, expected);
        Bytes output(expected.size(), 0xcd);
        if (!is_root) std::fill(array.begin(), array.end(), std::uint8_t{0xee});
        request.output = output.data();
        operation = perform(communicator, request, mode);
        EXPECT_EQ(output, expected);
      });
}

TEST_P(CollectivesTest, ScatterIntoUnequalBlocks) {
  for_each_case(
      [&](Communicator& communicator, DType dtype, const Rows& rows, std::uint64_t row, CallMode mode) {
        const auto rank = static_cast<std::size_t>(communicator.rank());
        const auto root = static_cast<int>((rows.base + row + 1) % size());
        const std::uint64_t count = rows.of(0) * 2;
        const Bytes all = input_of(dtype, count * row, 3);
        const std::size_t row_bytes = row * dtype_size(dtype);
        Request request{.kind = OpKind::kScatter, .root = root};
        if (communicator.rank() == root) {
          request.dtype = dtype;
          request.rows = count;
          request.row = row;
          request.input = all.data();
        }
        Operation operation = perform(communicator, request, mode);
        const Range block = block_range(count, size(), rank);
        EXPECT_EQ(result_of(operation), slice(all, block.begin * row_bytes, block.end * row_bytes));
        EXPECT_EQ(operation.descriptor.dtype, dtype);
        EXPECT_EQ(operation.descriptor.shape[0], block.size());
        EXPECT_EQ(operation.descriptor.shape[1], row);
      });
}

/// Rows that `source` sends to `destination`: unequal, some zero.
std::uint64_t alltoall_rows(const Rows& rows, std::size_t source, std::size_t destination) {
  return rows.base + rows.step * ((source * 5 + destination * 2) % 4);
}

TEST_P(CollectivesTest, AlltoallOfUnequalSplits) {
  for_each_case([&](Communicator& communicator, DType dtype, const Rows& rows, std::uint64_t row,
                    CallMode mode) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    const std::size_t row_bytes = row * dtype_size(dtype);
    const auto splits_of = [&](std::size_t source) {
      std::vector<std::uint64_t> splits;
      for (std::size_t peer = 0; peer < size(); ++peer) splits.push_back(alltoall_rows(rows, source, peer));
      return splits;
    };
    const auto array_of = [&](std::size_t source, std::size_t until) {
      const std::vector<std::uint64_t> splits = splits_of(source);
      return std::accumulate(splits.begin(), splits.begin() + static_cast<std::ptrdiff_t>(until),
                             std::uint64_t{0});
    };
    Bytes expected;
    std::vector<std::uint64_t> received;
    for (std::size_t source = 0; source < size(); ++source) {
      const Bytes theirs = input_of(dtype, array_of(source, size()) * row, source);
      append(expected,
             slice(theirs, array_of(source, rank) * row_bytes, array_of(source, rank + 1) * row_bytes));
      received.push_back(alltoall_rows(rows, source, rank));
    }
    const Bytes input = input_of(dtype, array_of(rank, size()) * row, rank);
    Request request{.kind = OpKind::kAlltoall, .dtype = dtype, .rows = array_of(rank, size()), .row = row};
    request.input = input.data();
    request.splits = splits_of(rank);
    Operation operation = perform(communicator, request, mode);
    EXPECT_EQ(result_of(operation), expected);
    EXPECT_EQ(operation.received, received);
  });
}

TEST_P(CollectivesTest, ReduceScatter) {
  for_each_case(
      [&](Communicator& communicator, DType dtype, const Rows& rows, std::uint64_t row, CallMode mode) {
        const auto rank = static_cast<std::size_t>(communicator.rank());
        const std::uint64_t count = rows.of(0) * 2;
        const std::size_t row_bytes = row * dtype_size(dtype);
        const Range block = block_range(count, size(), rank);
        std::vector<Bytes> mine;  // what the ranks have of this rank's block
        for (std::size_t peer = 0; peer < size(); ++peer)
          mine.push_back(
              slice(input_of(dtype, count * row, peer), block.begin * row_bytes, block.end * row_bytes));
        const ReduceOp op = dtype == DType::kBool || rows.step > 1 ? ReduceOp::kSum : ReduceOp::kAverage;
        const Bytes expected = reduce_oracle(dtype, {op}, mine);
        const Bytes input = input_of(dtype, count * row, rank);
        Request request{.kind = OpKind::kReduceScatter, .dtype = dtype, .rows = count, .row = row};
        request.input = input.data();
        request.reduction.op = op;
        Operation operation = perform(communicator, request, mode);
        EXPECT_EQ(result_of(operation), expected);
        EXPECT_EQ(operation.received, std::vector<std::uint64_t>{block.size()});
        Bytes output(expected.size(), 0xcd);
        output.reserve(1);  // so that data() is not null, which would mean: allocate
        request.output = output.data();
        request.output_bytes = output.size();
        operation = perform(communicator, request, mode);
        EXPECT_EQ(output, expected);
      });
}

// Of 2 + 3 ranks those of the smaller host show two pieces at once, in memory that is no larger than 2 MiB.
TEST(Allgather, OfPiecesLargerThanMuchStagingMemory) {
  constexpr std::uint64_t kRows = 5 << 20;
  GroupOptions options;
  options.transport = TransportKind::kCluster;
  options.size = 5;
  options.staging_bytes = 4 << 20;
  RankGroup group(options);
  group.run([&](Communicator& communicator) {
    const auto piece = [](std::size_t rank) { return input_of(DType::kUInt8, kRows, rank); };
    const Bytes input = piece(static_cast<std::size_t>(communicator.rank()));
    Request request{.kind = OpKind::kAllgather, .dtype = DType::kUInt8, .rows = kRows};
    request.input = input.data();
    const Operation operation = perform(communicator, request);
    const Bytes result = result_of(operation);
    for (std::size_t rank = 0; rank < 5; ++rank)
      EXPECT_TRUE(slice(result, rank * kRows, (rank + 1) * kRows) == piece(rank)) << "of rank " << rank;
  });
}

// Inputs in symmetric memory on all ranks, on some, on none; below and above the threshold of the direct way.
TEST_P(CollectivesTest, ReduceScatterFromSymmetricMemory) {
  group_.run([&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    const auto region = communicator.allocate_symmetric(128 * 1024, {});
    for (const std::uint64_t count : {100, 4097, 10000}) {
      const Range block = block_range(count, size(), rank);
      std::vector<Bytes> mine;
      for (std::size_t peer = 0; peer < size(); ++peer)
        mine.push_back(slice(input_of(DType::kFloat32, count, peer), block.begin * 4, block.end * 4));
      const Bytes expected = reduce_oracle(DType::kFloat32, {ReduceOp::kSum}, mine);
      Bytes ordinary = input_of(DType::kFloat32, count, rank);
      for (unsigned symmetric = 0; symmetric < 4; ++symmetric) {
        Request request{.kind = OpKind::kReduceScatter, .rows = count, .input = ordinary.data()};
        if ((symmetric >> (rank % 2)) & 1) {
          std::byte* const place = region->part(communicator.rank()) + 64 * rank;
          std::memcpy(place, ordinary.data(), ordinary.size());
          request.input = place;
        }
        const Operation operation = perform(communicator, request);
        EXPECT_EQ(result_of(operation), expected) << count << " elements, placement " << symmetric;
      }
    }
  });
}

TEST_P(CollectivesTest, BarrierHoldsUntilAllHaveCome) {
  std::atomic<int> came{0};
  group_.run([&](Communicator& communicator) {
    for (int round = 1; round <= 50; ++round) {
      ++came;
      Operation barrier = barrier_operation();
      perform(communicator, barrier, round % 2 == 0 ? CallMode::kSync : CallMode::kAsync);
      EXPECT_GE(came.load(), round * communicator.size());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Groups, CollectivesTest, ::testing::ValuesIn(all_group_cases()),
                         [](const auto& info) { return case_name(info.param); });

// Between more than two hosts what is large is sent as messages, along chains and to those it is for.
std::vector<GroupCase> many_hosts() {
  return {{TransportKind::kCluster, 7, 1024, false, 3},
          {TransportKind::kCluster, 4, 1024, false, 4},
          {TransportKind::kClusterMpi, 5, 1024, false, 3}};
}

INSTANTIATE_TEST_SUITE_P(ManyHosts, CollectivesTest, ::testing::ValuesIn(many_hosts()), [](const auto& info) {
  return case_name(info.param) + "_hosts" + std::to_string(info.param.hosts);
});

}  // namespace
}  // namespace multiring
