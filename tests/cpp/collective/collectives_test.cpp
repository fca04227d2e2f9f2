// The collectives that move or split rows, each in its synchronous and asynchronous form.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "support/operations.h"
#include "support/rows.h"
#include "topology/chunks.h"

namespace multiring {
namespace {
using namespace testing;

// With the rows below: nothing at all, one element a rank, odd numbers, several segments.
constexpr Rows kRows[] = {{0, 0}, {1, 0}, {0, 1}, {5, 0}, {0, 37}, {3, 400}};
constexpr std::uint64_t kRowElements[] = {1, 3};

/// One of the cases that every collective is tried with, on one rank.
struct Case {
  Communicator& communicator;
  DType dtype;
  Rows rows;
  std::uint64_t row;
  CallMode mode;
  int self = communicator.rank();
  std::size_t rank = static_cast<std::size_t>(self);
  std::size_t size = static_cast<std::size_t>(communicator.size());
  std::size_t row_bytes = row * dtype_size(dtype);

  /// What `source` has in `count` rows.
  Bytes input(std::uint64_t count, std::size_t source) const { return input_of(dtype, count * row, source); }
  /// The rows that ranks have of their own, one after the other: those of the ranks before `end`.
  Bytes joined(std::size_t end) const {
    Bytes all;
    for (std::size_t source = 0; source < end; ++source) append(all, input(rows.of(source), source));
    return all;
  }
  std::vector<std::uint64_t> rows_of_all() const {
    std::vector<std::uint64_t> all;
    for (std::size_t source = 0; source < size; ++source) all.push_back(rows.of(source));
    return all;
  }
  Request request(OpKind kind, std::uint64_t count, const Bytes& array, int root = -1) const {
    return {.kind = kind, .dtype = dtype, .rows = count, .row = row, .input = array.data(), .root = root};
  }
  Operation perform(const Request& request) const { return testing::perform(communicator, request, mode); }
};

class CollectivesTest : public GroupTest {
 protected:
  /// Runs `body` on all ranks for every dtype, mode, number of rows and length of a row.
  template <class Body>
  void for_each_case(const Body& body) {
    group_.run([&](Communicator& communicator) {
      for (const DType dtype : kAllDTypes)
        for (const Rows& rows : kRows)
          for (const std::uint64_t row : kRowElements)
            for (const CallMode mode : kCallModes) {
              SCOPED_TRACE(std::string(dtype_name(dtype)) + " rows of " + std::to_string(row) + ", " +
                           std::to_string(rows.base) + " + " + std::to_string(rows.step) + " x rank");
              body(Case{communicator, dtype, rows, row, mode});
            }
    });
  }
};

TEST_P(CollectivesTest, AllgatherOfUnequalLengths) {
  for_each_case([](const Case& c) {
    const Bytes input = c.input(c.rows.of(c.rank), c.rank);
    const Bytes expected = c.joined(c.size);
    Request request = c.request(OpKind::kAllgather, c.rows.of(c.rank), input);
    const Operation operation = c.perform(request);
    EXPECT_EQ(result_of(operation), expected);
    EXPECT_EQ(operation.received, c.rows_of_all());
    // Into memory of the caller's, with the input in its place there.
    Bytes output(expected.size(), 0xcd);
    const std::size_t begin = c.joined(c.rank).size();
    std::copy(input.begin(), input.end(), output.begin() + static_cast<std::ptrdiff_t>(begin));
    request.input = output.data() + begin;
    request.output = output.data();
    request.output_bytes = output.size();
    c.perform(request);
    EXPECT_EQ(output, expected);
  });
}

TEST_P(CollectivesTest, GatherOfUnequalLengths) {
  for_each_case([](const Case& c) {
    const auto root = static_cast<int>((c.rows.step + c.row) % c.size);
    const Bytes input = c.input(c.rows.of(c.rank), c.rank);
    const Operation operation = c.perform(c.request(OpKind::kGather, c.rows.of(c.rank), input, root));
    if (c.self == root) {
      EXPECT_EQ(result_of(operation), c.joined(c.size));
      EXPECT_EQ(operation.received, c.rows_of_all());
    } else {
      EXPECT_EQ(operation.output, nullptr);
    }
  });
}

TEST_P(CollectivesTest, BroadcastInPlaceAndOutOfPlace) {
  for_each_case([](const Case& c) {
    const auto root = static_cast<int>((c.rows.base + c.row) % c.size);
    const Bytes expected = c.input(c.rows.of(0), static_cast<std::size_t>(root));
    Bytes array = c.self == root ? expected : Bytes(expected.size(), 0xcd);
    Request request = c.request(OpKind::kBroadcast, c.rows.of(0), array, root);
    request.output = array.data();
    c.perform(request);
    EXPECT_EQ(array, expected);
    Bytes output(expected.size(), 0xcd);
    if (c.self != root) std::fill(array.begin(), array.end(), std::uint8_t{0xee});
    request.output = output.data();
    c.perform(request);
    EXPECT_EQ(output, expected);
  });
}

TEST_P(CollectivesTest, ScatterIntoUnequalBlocks) {
  for_each_case([](const Case& c) {
    const auto root = static_cast<int>((c.rows.base + c.row + 1) % c.size);
    const std::uint64_t count = c.rows.of(0) * 2;
    const Bytes all = c.input(count, 3);
    Request request = c.request(OpKind::kScatter, count, all, root);
    if (c.self != root) request = {.kind = OpKind::kScatter, .root = request.root};
    const Operation operation = c.perform(request);
    const Range block = block_range(count, c.size, c.rank);
    EXPECT_EQ(result_of(operation), slice(all, block.begin * c.row_bytes, block.end * c.row_bytes));
    EXPECT_EQ(operation.descriptor.dtype, c.dtype);
    EXPECT_EQ(operation.descriptor.shape[0], block.size());
    EXPECT_EQ(operation.descriptor.shape[1], c.row);
  });
}

TEST_P(CollectivesTest, AlltoallOfUnequalSplits) {
  for_each_case([](const Case& c) {
    /// Rows that `source` sends: unequal, some zero.
    const auto splits_of = [&](std::size_t source) {
      std::vector<std::uint64_t> splits;
      for (std::size_t peer = 0; peer < c.size; ++peer)
        splits.push_back(c.rows.base + c.rows.step * ((source * 5 + peer * 2) % 4));
      return splits;
    };
    const auto rows_before = [&](std::size_t source, std::size_t end) {
      const std::vector<std::uint64_t> splits = splits_of(source);
      return std::accumulate(splits.begin(), splits.begin() + static_cast<std::ptrdiff_t>(end),
                             std::uint64_t{0});
    };
    Bytes expected;
    std::vector<std::uint64_t> received;
    for (std::size_t source = 0; source < c.size; ++source) {
      append(expected,
             slice(c.input(rows_before(source, c.size), source), rows_before(source, c.rank) * c.row_bytes,
                   rows_before(source, c.rank + 1) * c.row_bytes));
      received.push_back(splits_of(source)[c.rank]);
    }
    const Bytes input = c.input(rows_before(c.rank, c.size), c.rank);
    Request request = c.request(OpKind::kAlltoall, rows_before(c.rank, c.size), input);
    request.splits = splits_of(c.rank);
    const Operation operation = c.perform(request);
    EXPECT_EQ(result_of(operation), expected);
    EXPECT_EQ(operation.received, received);
  });
}

TEST_P(CollectivesTest, ReduceScatter) {
  for_each_case([](const Case& c) {
    const std::uint64_t count = c.rows.of(0) * 2;
    const Range block = block_range(count, c.size, c.rank);
    const ReduceOp op = c.dtype == DType::kBool ? ReduceOp::kMax
                        : c.rows.step > 1       ? ReduceOp::kSum
                                                : ReduceOp::kAverage;
    const Bytes expected =
        reduced_block(c.dtype, op, count * c.row, {block.begin * c.row, block.end * c.row}, c.size);
    const Bytes input = c.input(count, c.rank);
    Request request = c.request(OpKind::kReduceScatter, count, input);
    request.reduction.op = op;
    const Operation operation = c.perform(request);
    EXPECT_EQ(result_of(operation), expected);
    EXPECT_EQ(operation.received, std::vector<std::uint64_t>{block.size()});
    Bytes output(expected.size(), 0xcd);
    output.reserve(1);  // so that data() is not null, which would mean: allocate
    request.output = output.data();
    request.output_bytes = output.size();
    c.perform(request);
    EXPECT_EQ(output, expected);
  });
}

// Some pieces alone would use another algorithm than the longest: what those ranks have not staged comes in
// another round.
TEST(Gathers, OfPiecesThatWouldGoInDifferentWays) {
  GroupOptions options(TransportKind::kCluster, 3, 4096);
  options.hosts = 3;
  options.communicator.tuning =
      "allgather 0-1000 rounds\nallgather 0-2000 1x3p\nallgather 0- rounds\n"
      "gather 0-1000 rounds\ngather 0-2000 messages\ngather 0- rounds";
  RankGroup group(options);
  const auto gathered = [](Communicator& communicator, const std::vector<std::uint64_t>& rows) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    const Bytes input = input_of(DType::kUInt8, rows[rank], rank);
    Bytes expected;
    for (std::size_t each = 0; each < rows.size(); ++each)
      append(expected, input_of(DType::kUInt8, rows[each], each));
    Request request{
        .kind = OpKind::kAllgather, .dtype = DType::kUInt8, .rows = rows[rank], .input = input.data()};
    EXPECT_EQ(result_of(perform(communicator, request)), expected);
    request.kind = OpKind::kGather;
    for (request.root = 0; request.root < communicator.size(); ++request.root)
      EXPECT_EQ(result_of(perform(communicator, request)),
                communicator.rank() == request.root ? expected : Bytes());
  };
  group.run([&](Communicator& communicator) {
    gathered(communicator, {10, 1500, 9000});
    gathered(communicator, {10, 1500, 0});
    gathered(communicator, {1500, 10, 9000});
    gathered(communicator, {9000, 9000, 9000});
  });
}

// Of 2 + 3 ranks those of the smaller host show two pieces at once, in memory that is no larger than 2 MiB.
TEST(Allgather, OfPiecesLargerThanMuchStagingMemory) {
  constexpr std::uint64_t kRows = 5 << 20;
  RankGroup group(GroupOptions(TransportKind::kCluster, 5, 4 << 20));
  group.run([&](Communicator& communicator) {
    const auto piece = [](std::size_t rank) { return input_of(DType::kUInt8, kRows, rank); };
    const Bytes input = piece(static_cast<std::size_t>(communicator.rank()));
    const Bytes result = result_of(
        perform(communicator,
                {.kind = OpKind::kAllgather, .dtype = DType::kUInt8, .rows = kRows, .input = input.data()}));
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
      const auto all = static_cast<std::size_t>(size());
      const Bytes expected =
          reduced_block(DType::kFloat32, ReduceOp::kSum, count, block_range(count, all, rank), all);
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
      perform(communicator, barrier_operation(), kCallModes[round % 2]);
      EXPECT_GE(came.load(), round * communicator.size());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Groups, CollectivesTest, ::testing::ValuesIn(all_group_cases()), kPrinted);

// Among more than two hosts, where what has no plan crosses by messages, in rounds, or as the table says.
std::vector<GroupCase> many_hosts() {
  return {{TransportKind::kCluster, 7, 1024, false, 3, "messages"},
          {TransportKind::kCluster, 7, 1024, false, 3, "rounds"},
          {TransportKind::kCluster, 4, 1024, false, 4},
          {TransportKind::kClusterRing, 7, 1024, false, 5},
          {TransportKind::kClusterLine, 5, 1024, false, 4},
          {TransportKind::kClusterMpi, 5, 1024, false, 3, "messages"}};
}

INSTANTIATE_TEST_SUITE_P(ManyHosts, CollectivesTest, ::testing::ValuesIn(many_hosts()), kPrinted);

}  // namespace
}  // namespace multiring
