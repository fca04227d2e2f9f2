// The C ABI's collectives and messages on a communicator.

#include <cstdint>
#include <latch>
#include <string>
#include <vector>

#include "capi/communicator.h"
#include "multiring.h"
#include "support/errors.h"
#include "support/rank_group.h"

namespace {

using namespace multiring::testing;

/// Runs `body` on `size` ranks, each with the communicator of all.
template <class Body>
void on_communicators(int size, const Body& body) {
  RankGroup({TransportKind::kShm, size}).run([&](multiring::Communicator& world) {
    mr_communicator communicator{world.shared_from_this()};
    EXPECT_EQ(mr_communicator_rank(&communicator), world.rank());
    EXPECT_EQ(mr_communicator_size(&communicator), size);
    body(communicator);
  });
}

bool tells(const mr_error& error, const char* text) {
  return std::string(error.message).find(text) != std::string::npos;
}

mr_operation operation_of(mr_kind kind, const std::vector<std::int32_t>& input,
                          std::vector<std::int32_t>& output, const std::uint64_t (&shape)[2]) {
  mr_operation made = MR_OPERATION_INIT;
  made.kind = kind;
  made.dtype = MR_INT32;
  made.input = input.data();
  made.output = output.data();
  made.output_bytes = output.size() * sizeof(std::int32_t);
  made.dims = 2;
  made.shape = shape;
  return made;
}

TEST(CApiCommunicator, RunsCollectives) {
  on_communicators(3, [](mr_communicator& communicator) {
    const int rank = mr_communicator_rank(&communicator);
    const std::uint64_t one[] = {1, 2};
    const std::uint64_t three[] = {3, 2};
    mr_error error = MR_ERROR_INIT;
    const std::vector<std::int32_t> mine = {rank, rank + 10};
    std::vector<std::int32_t> joined(6);
    mr_operation gather = operation_of(MR_ALLGATHER, mine, joined, one);
    ASSERT_EQ(mr_communicator_run(&communicator, &gather, &error), MR_OK) << error.message;
    EXPECT_EQ(joined, (std::vector<std::int32_t>{0, 10, 1, 11, 2, 12}));
    std::vector<std::int32_t> share(2);
    mr_operation scatter = operation_of(MR_REDUCE_SCATTER, joined, share, three);
    ASSERT_EQ(mr_communicator_run(&communicator, &scatter, &error), MR_OK) << error.message;
    EXPECT_EQ(share, (std::vector<std::int32_t>{3 * rank, 3 * (rank + 10)}));
    std::vector<std::int32_t> total(2);
    mr_operation sum = operation_of(MR_ALLREDUCE, mine, total, one);
    ASSERT_EQ(mr_communicator_run(&communicator, &sum, nullptr), MR_OK);
    EXPECT_EQ(total, (std::vector<std::int32_t>{3, 33}));
  });
}

TEST(CApiCommunicator, SendsAndReceives) {
  on_communicators(2, [](mr_communicator& communicator) {
    const int other = 1 - mr_communicator_rank(&communicator);
    const std::string text = "from rank " + std::to_string(1 - other);
    std::string received(text.size(), ' ');
    ASSERT_EQ(mr_communicator_send(&communicator, other, 7, text.data(), text.size(), nullptr), MR_OK);
    ASSERT_EQ(mr_communicator_receive(&communicator, other, 7, received.data(), received.size(), nullptr),
              MR_OK);
    EXPECT_EQ(received, "from rank " + std::to_string(other));
  });
}

TEST(CApiCommunicator, TellsWhatIsWrong) {
  on_communicators(2, [](mr_communicator& communicator) {
    const int rank = mr_communicator_rank(&communicator);
    mr_error error = MR_ERROR_INIT;
    char byte = 0;
    EXPECT_EQ(mr_communicator_send(&communicator, 5, 0, &byte, 1, &error), MR_USAGE);
    EXPECT_TRUE(tells(error, "rank 5")) << error.message;
    const std::uint64_t shape[] = {1, static_cast<std::uint64_t>(rank + 1)};
    std::vector<std::int32_t> values(2);
    mr_operation sum = operation_of(MR_ALLREDUCE, values, values, shape);
    sum.output_bytes = (static_cast<std::size_t>(rank) + 1) * sizeof(std::int32_t);
    EXPECT_EQ(mr_communicator_run(&communicator, &sum, &error), MR_MISMATCH);
    EXPECT_TRUE(tells(error, "int32[1, 2]")) << error.message;
  });
}

TEST(CApiCommunicator, AnInterruptEndsAWait) {
  std::latch ended(1);
  on_communicators(2, [&](mr_communicator& communicator) {
    if (mr_communicator_rank(&communicator) == 1) return ended.wait();
    communicator.interrupt = [] { throw multiring::Error(multiring::ErrorKind::kAborted, "told to stop"); };
    char byte = 0;
    mr_error error = MR_ERROR_INIT;
    EXPECT_EQ(mr_communicator_receive(&communicator, 1, 0, &byte, 1, &error), MR_ABORTED);
    EXPECT_TRUE(tells(error, "told to stop")) << error.message;
    ended.count_down();
  });
}

}  // namespace
