// Queued operations that share memory: they run in the order of submission, whatever their priorities, and
// are not fused.

#include "engine/memory_in_flight.h"

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "support/named.h"
#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

TEST(RangeSet, FindsTheLastOfThoseThatShareAByte) {
  std::mt19937 random(1);
  for (int repeat = 0; repeat < 200; ++repeat) {
    RangeSet ranges;
    std::vector<std::uint64_t> bytes(64, 0);  // the last number of each; ranges that are joined share it
    for (std::uint64_t number = 1; number <= 12; ++number) {
      const std::size_t begin = random() % 60;
      const std::size_t end = begin + 1 + random() % 4;
      for (std::size_t from = 0; from < 64; ++from)
        for (std::size_t to = from + 1; to <= 64; ++to) {
          const auto last = *std::max_element(bytes.begin() + static_cast<std::ptrdiff_t>(from),
                                              bytes.begin() + static_cast<std::ptrdiff_t>(to));
          const auto found = ranges.last_in(from, to);
          // What is joined is found by all of it.
          ASSERT_GE(found, last);
          ASSERT_EQ(found == 0, last == 0);
        }
      ranges.insert(begin, end, number);
      std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(begin),
                bytes.begin() + static_cast<std::ptrdiff_t>(end), number);
    }
  }
}

TEST(RangeSet, RangesThatTouchAreApart) {
  RangeSet ranges;
  ranges.insert(0, 10, 1);
  ranges.insert(20, 30, 2);
  ranges.insert(10, 20, 3);
  EXPECT_EQ(ranges.last_in(0, 10), 1u);
  EXPECT_EQ(ranges.last_in(10, 20), 3u);
  EXPECT_EQ(ranges.last_in(20, 30), 2u);
  EXPECT_EQ(ranges.last_in(9, 21), 3u);
  EXPECT_EQ(ranges.last_in(30, 40), 0u);
  ranges.remove_before(3);
  EXPECT_EQ(ranges.size(), 1u);
}

TEST(MemoryInFlight, ReadersDoNotWaitForReaders) {
  Array x(10), y(10), z(10);
  const auto moved = [](Array& from, Array& to) {
    return allreduce_of(DType::kInt64, from.size(), from.data(), to.data());
  };
  MemoryInFlight memory;
  EXPECT_EQ(memory.add(moved(x, y), 1, 1), 0u);
  EXPECT_EQ(memory.add(moved(x, z), 2, 1), 0u);             // reads what the first reads
  EXPECT_EQ(memory.add(sum_in_place(x), 3, 1), 2u);         // writes what both read
  EXPECT_EQ(memory.add(moved(y, z), 4, 1), 2u);             // writes what the second writes
  EXPECT_EQ(memory.last_conflict(sum_in_place(x), 4), 0u);  // all of them have ended
  EXPECT_EQ(memory.last_conflict(sum_in_place(y), 4), 4u);
  memory.clear();
  EXPECT_EQ(memory.last_conflict(sum_in_place(y), 1), 0u);
}

TEST(MemoryInFlight, ForgetsWhatHasEnded) {
  std::vector<Array> arrays(1000, Array(1));
  MemoryInFlight memory;
  for (std::uint64_t number = 1; number <= arrays.size(); ++number)
    EXPECT_EQ(memory.add(sum_in_place(arrays[number - 1]), number, std::max<std::uint64_t>(number, 11) - 10),
              0u);
  EXPECT_EQ(memory.last_conflict(sum_in_place(arrays[999]), 991), 1000u);
  EXPECT_EQ(memory.last_conflict(sum_in_place(arrays[0]), 991), 0u);
}

class SharedMemoryTest : public GroupTest {};

/// Operations on ranges of one array, or on copies of them (`apart`), and what the array is afterwards: every
/// rank has the same values, so a sum multiplies them by the number of ranks.
struct Program {
  struct Step {
    std::size_t from, to, count;
    int priority;
  };
  std::vector<Step> steps;

  explicit Program(unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < 30; ++i) {
      const std::size_t count = 1 + random() % 20;
      const std::size_t from = random() % (kElements - count);
      std::size_t to = random() % (kElements - count);
      if (random() % 2 == 0 || (from < to + count && to < from + count)) to = from;
      steps.push_back({from, to, count, static_cast<int>(random() % 3)});
    }
  }
  static constexpr std::size_t kElements = 60;

  Array expected(std::int64_t size) const {
    Array array(kElements, 1);
    for (const auto& [from, to, count, priority] : steps)
      for (std::size_t i = 0; i < count; ++i)  // they wrap, as sums do
        array[to + i] = static_cast<std::int64_t>(static_cast<std::uint64_t>(array[from + i]) *
                                                  static_cast<std::uint64_t>(size));
    return array;
  }
};

TEST_P(SharedMemoryTest, RunsInTheOrderOfSubmission) {
  group_.run([](Communicator& communicator) {
    for (unsigned seed = 0; seed < 20; ++seed) {
      const Program program(seed);
      Array array(Program::kElements, 1);
      std::vector<std::shared_ptr<Work>> works;
      for (const auto& [from, to, count, priority] : program.steps)
        works.push_back(communicator.submit(allreduce_of(DType::kInt64, count, &array[from], &array[to]),
                                            priority, nullptr));
      for (const auto& work : works) work->wait(Deadline::never(), {});
      ASSERT_EQ(array, program.expected(communicator.size())) << "seed " << seed;
    }
  });
}

// Ranks then choose different operations by priority, and have to agree on one.
TEST_P(SharedMemoryTest, MemoryMayBeSharedOnOneRankAlone) {
  group_.run([](Communicator& communicator) {
    const bool is_shared = communicator.rank() == communicator.size() - 1;
    for (int repeat = 0; repeat < 20; ++repeat) {
      Array first(8, 1), second(8, 1), other(8, 1);
      Array& target = is_shared ? first : second;
      std::vector<std::shared_ptr<Work>> works;
      works.push_back(communicator.submit(sum_in_place(first, "first"), 0, nullptr));
      works.push_back(communicator.submit(sum_in_place(other, "other"), 1, nullptr));
      works.push_back(communicator.submit(sum_in_place(target, "second"), 2, nullptr));
      for (const auto& work : works) work->wait(Deadline::never(), {});
      const std::int64_t size = communicator.size();
      // Those that share nothing give ones to the second sum, the one that shares its first sum.
      ASSERT_EQ(target, Array(8, size - 1 + size));
      ASSERT_EQ(other, Array(8, size));
      if (!is_shared) {
        ASSERT_EQ(first, Array(8, size));
      }
    }
  });
}

TEST_P(SharedMemoryTest, AMismatchIsFoundAllTheSame) {
  if (group_.size() == 1) return;
  group_.run([](Communicator& communicator) {
    Array array(communicator.rank() == 0 ? 9 : 8, 1);
    const auto first = communicator.submit(barrier_operation(), 0, nullptr);
    const auto second = communicator.submit(sum_in_place(array, "wrong"), 1, nullptr);
    const auto third = communicator.submit(sum_in_place(array, "third"), 2, nullptr);
    EXPECT_THROW(third->wait(Deadline::never(), {}), Error);
    error_of(ErrorKind::kMismatch, [&] { second->wait(Deadline::never(), {}); }, "'wrong'");
  });
}

TEST_P(SharedMemoryTest, MessagesWaitForQueuedOperations) {
  if (group_.size() == 1) return;
  group_.run([](Communicator& communicator) {
    Array array(5000, 1), got(5000, 0);
    const auto work = communicator.submit(sum_in_place(array), 0, nullptr);
    if (communicator.rank() == 0) {
      Operation send = send_of(DType::kInt64, array.size(), array.data(), 1);
      communicator.send(send, 0, {});
    } else if (communicator.rank() == 1) {
      Operation receive = make_operation({.kind = OpKind::kReceive,
                                          .dtype = DType::kInt64,
                                          .rows = got.size(),
                                          .output = got.data(),
                                          .output_bytes = got.size() * sizeof(std::int64_t),
                                          .root = 0});
      communicator.receive(receive, 0, {});
      EXPECT_EQ(got, Array(5000, communicator.size()));
    }
    work->wait(Deadline::never(), {});
  });
}

// Rank 0 submits the second name first, so that it is matched first where the first is not in its way.
TEST_P(SharedMemoryTest, NamedOperationsKeepTheOrderOfTheirRank) {
  group_.run([](Communicator& communicator) {
    const auto queue = queue_over(communicator);
    const std::int64_t size = communicator.size();
    for (int repeat = 0; repeat < 20; ++repeat) {
      Array array(20, 1), free(20, 1), one(20, 1), two(20, size);
      std::vector<std::shared_ptr<Work>> works;
      if (communicator.rank() == 0) {
        works = {submit(*queue, two, "two"), submit(*queue, free, "free"), submit(*queue, one, "one")};
      } else {
        works = {submit(*queue, array, "one"), submit(*queue, array, "two"), submit(*queue, free, "free")};
      }
      for (const auto& work : works) wait(work);
      const Array expected(20, size * size);
      ASSERT_EQ(communicator.rank() == 0 ? two : array, size > 1 ? expected : two);
      ASSERT_EQ(free, Array(20, size));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Groups, SharedMemoryTest, ::testing::ValuesIn(all_group_cases()), kPrinted);

}  // namespace
}  // namespace multiring
