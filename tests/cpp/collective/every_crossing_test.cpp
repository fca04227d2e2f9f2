// Collectives of several hosts by every algorithm that can carry them there.

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "support/modes.h"
#include "support/operations.h"
#include "support/rows.h"
#include "topology/chunks.h"

namespace multiring {
namespace {
using namespace testing;

/// Hosts, what is between them, and the algorithms by which collectives cross there: reduce_scatter, and
/// those that add nothing.
struct Crossing {
  std::vector<int> layout;
  std::string reduce_scatter;
  std::string gathering;
  TransportKind transport = TransportKind::kCluster;

  GroupOptions options() const {
    GroupOptions options(transport, std::accumulate(layout.begin(), layout.end(), 0), 4096);
    options.layout = layout;
    options.communicator.tuning =
        "reduce_scatter 0- " + reduce_scatter + "\nallgather 0- " + gathering + "\nbroadcast 0- " + gathering;
    return options;
  }
};

/// Every algorithm that keeps blocks apart, and what only some of them run on. Sums are canonical: those of a
/// ring of more than two hosts take the pairwise exchange in its place.
std::vector<Crossing> crossings() {
  std::vector<Crossing> found{
      {{1, 1, 1, 1, 1, 1, 1}, "allreduce:1x7t", "rounds"},
      {{1, 2, 2}, "2x3p/64", "2x3r/64", TransportKind::kClusterMpi},
      {{1, 1, 1, 1, 1}, "1x5c", "1x5r", TransportKind::kClusterRing},
      {{2, 1, 2, 2}, "2x4c", "2x4c", TransportKind::kClusterRing},
      {{3, 1, 2, 1}, "3x4c", "3x4c", TransportKind::kClusterLine},
  };
  for (const auto& [layout, pattern] :
       std::vector<std::pair<std::vector<int>, const char*>>{{{1, 1}, "1x2?"},
                                                             {{2, 2}, "2x2?"},
                                                             {{1, 3, 2}, "3x3?"},
                                                             {{4, 3, 2, 1}, "4x4?"},
                                                             {{1, 1, 1, 1, 1, 1, 1}, "1x7?"}})
    for (const std::string& mode : modes_of_all(pattern, Order::kAny, true))
      found.push_back({layout, mode, mode});
  return found;
}

// In the canonical order, whatever the algorithm.
TEST(EveryCrossing, ReducesAndScatters) {
  for (const Crossing& crossing : crossings()) {
    SCOPED_TRACE(crossing.options().communicator.tuning);
    RankGroup(crossing.options()).run([](Communicator& communicator) {
      const auto size = static_cast<std::size_t>(communicator.size());
      const auto rank = static_cast<std::size_t>(communicator.rank());
      for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kInt8, DType::kComplex128})
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage})
          for (const std::uint64_t count : {0, 1, 37, 20001}) {
            const Bytes input = input_of(dtype, count, rank);
            Request request{
                .kind = OpKind::kReduceScatter, .dtype = dtype, .rows = count, .input = input.data()};
            request.reduction.op = op;
            const Bytes expected = reduced_block(dtype, op, count, block_range(count, size, rank), size);
            for (const CallMode mode : kCallModes)
              EXPECT_TRUE(result_of(perform(communicator, request, mode)) == expected)
                  << dtype_name(dtype) << "[" << count << "] on rank " << rank;
          }
    });
  }
}

TEST(EveryCrossing, Gathers) {
  for (const Crossing& crossing : crossings()) {
    SCOPED_TRACE(crossing.options().communicator.tuning);
    RankGroup(crossing.options()).run([](Communicator& communicator) {
      const auto size = static_cast<std::size_t>(communicator.size());
      for (const Rows& rows : {Rows{0, 0}, Rows{1, 0}, Rows{0, 1}, Rows{7, 37}, Rows{0, 9001}}) {
        const auto piece = [&](std::size_t rank) { return input_of(DType::kInt32, rows.of(rank), rank); };
        Bytes expected;
        for (std::size_t rank = 0; rank < size; ++rank) append(expected, piece(rank));
        const auto rank = static_cast<std::size_t>(communicator.rank());
        const Bytes input = piece(rank);
        const Request request{
            .kind = OpKind::kAllgather, .dtype = DType::kInt32, .rows = rows.of(rank), .input = input.data()};
        for (const CallMode mode : kCallModes)
          EXPECT_TRUE(result_of(perform(communicator, request, mode)) == expected)
              << rows.base << " + " << rows.step << " x rank, on rank " << rank;
      }
    });
  }
}

TEST(EveryCrossing, Broadcasts) {
  for (const Crossing& crossing : crossings()) {
    SCOPED_TRACE(crossing.options().communicator.tuning);
    RankGroup(crossing.options()).run([](Communicator& communicator) {
      for (int root = 0; root < communicator.size(); ++root)
        for (const std::uint64_t count : {0, 1, 37, 20001}) {
          const Bytes expected = input_of(DType::kInt32, count, static_cast<std::size_t>(root));
          Bytes array = communicator.rank() == root ? expected : Bytes(expected.size(), 0xcd);
          perform(communicator, {.kind = OpKind::kBroadcast,
                                 .dtype = DType::kInt32,
                                 .rows = count,
                                 .input = array.data(),
                                 .output = array.data(),
                                 .root = root});
          EXPECT_TRUE(array == expected) << count << " from rank " << root;
        }
    });
  }
}

}  // namespace
}  // namespace multiring
