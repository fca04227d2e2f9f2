// Operations matched by name: any order, any thread, any collective.

#include "engine/named/named_queue.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "support/named.h"

namespace multiring {
namespace {

using namespace testing;

class NamedQueueTest : public GroupTest {};

/// The numbers 0 ... count - 1 in any order.
std::vector<std::size_t> shuffled(std::size_t count, std::mt19937& random) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

TEST_P(NamedQueueTest, EveryRankInAnOrderOfItsOwn) {
  group_.run([](Communicator& communicator) {
    const auto queue = queue_over(communicator);
    EXPECT_EQ(queue->rank(), communicator.rank());
    EXPECT_EQ(queue->size(), communicator.size());
    std::mt19937 random(static_cast<unsigned>(communicator.rank()));
    for (int repeat = 0; repeat < 10; ++repeat) {
      std::vector<Array> arrays;
      for (std::size_t i = 0; i < 60; ++i) arrays.emplace_back(i * i % 997, static_cast<std::int64_t>(i));
      std::vector<std::size_t> order = shuffled(arrays.size(), random);
      std::vector<std::shared_ptr<Work>> works(arrays.size());
      for (const std::size_t i : order) {
        works[i] = submit(*queue, arrays[i], numbered("gradient/", i));
        if (random() % 16 == 0) std::this_thread::yield();
      }
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t i : order) {
        wait(works[i]);
        EXPECT_EQ(arrays[i], Array(arrays[i].size(), static_cast<std::int64_t>(i) * communicator.size()));
      }
    }
    EXPECT_FALSE(queue->is_broken());
  });
}

TEST_P(NamedQueueTest, ThreadsOfARankEachInAnOrderOfItsOwn) {
  group_.run([](Communicator& communicator) {
    const auto queue = queue_over(communicator);
    in_threads(3, [&](int thread) {
      std::mt19937 random(static_cast<unsigned>(10 * communicator.rank() + thread));
      std::vector<Array> arrays(40);
      std::vector<std::shared_ptr<Work>> works;
      for (const std::size_t i : shuffled(arrays.size(), random)) {
        arrays[i].assign(100, static_cast<std::int64_t>(i));
        const std::size_t number = 100 * static_cast<std::size_t>(thread) + i;
        works.push_back(submit(*queue, arrays[i], numbered("thread/", number)));
      }
      for (const auto& work : works) wait(work);
      for (std::size_t i = 0; i < arrays.size(); ++i)
        EXPECT_EQ(arrays[i], Array(100, static_cast<std::int64_t>(i) * communicator.size()));
    });
  });
}

// Each name again and again, several of it in flight; the values tell which submission met which.
TEST_P(NamedQueueTest, TheKthOfANameMeetsTheKth) {
  group_.run([](Communicator& communicator) {
    const auto queue = queue_over(communicator);
    const int rank = communicator.rank();
    const char* names[] = {"a", "b", "c"};
    std::vector<Array> arrays(90);
    std::vector<std::shared_ptr<Work>> works(arrays.size());
    for (int k = 0; k < 30; ++k)
      for (int n = 0; n < 3; ++n) {
        const int name = (n + rank) % 3;
        const auto place = static_cast<std::size_t>(30 * name + k);
        arrays[place].assign(5, 100 * k);
        works[place] = submit(*queue, arrays[place], names[name]);
      }
    for (std::size_t i = 0; i < works.size(); ++i) {
      wait(works[i]);
      EXPECT_EQ(arrays[i], Array(5, static_cast<std::int64_t>(i % 30) * 100 * communicator.size()));
    }
  });
}

TEST_P(NamedQueueTest, AllCollectivesAndGroupsOfThem) {
  group_.run([](Communicator& communicator) {
    const auto queue = queue_over(communicator);
    const auto size = static_cast<std::size_t>(communicator.size());
    const auto rank = static_cast<std::size_t>(communicator.rank());
    Array sum(1000, 1);
    Array root(700, communicator.rank());
    const Array rows(rank + 1, communicator.rank());
    NamedRequest request = sum_of(sum, "group");
    request.operations.push_back(make_operation({.kind = OpKind::kBroadcast,
                                                 .dtype = DType::kInt64,
                                                 .rows = root.size(),
                                                 .input = root.data(),
                                                 .output = root.data(),
                                                 .root = communicator.size() - 1}));
    request.operations.push_back(make_operation(
        {.kind = OpKind::kAllgather, .dtype = DType::kInt64, .rows = rows.size(), .input = rows.data()}));
    request.operations.push_back(barrier_operation());
    std::atomic<int> ended{0};
    request.done = [&](const Error* error, std::span<const std::shared_ptr<Work>> works) {
      EXPECT_EQ(error, nullptr);
      EXPECT_EQ(works.size(), 4u);
      EXPECT_TRUE(std::all_of(works.begin(), works.end(), [](const auto& work) { return work->done(); }));
      EXPECT_EQ(works[2]->operation().result.bytes(), size * (size + 1) / 2 * sizeof(std::int64_t));
      ++ended;
    };
    for (const auto& work : queue->submit(std::move(request))) wait(work);
    EXPECT_EQ(sum, Array(1000, communicator.size()));
    EXPECT_EQ(root, Array(700, communicator.size() - 1));
    queue->close();
    EXPECT_EQ(ended, 1);
  });
}

// A chain: each callback submits the next one. And rank 0 does so much later than the others.
TEST_P(NamedQueueTest, CallbacksMaySubmit) {
  group_.run([](Communicator& communicator) {
    const auto queue = queue_over(communicator);
    Array array(3, 1);
    Latch finished(1);
    std::function<void(int)> step = [&](int left) {
      queue->submit(sum_of(array, numbered("step ", left), [&, left](const Error* error, auto) {
        EXPECT_EQ(error, nullptr);
        if (left == 0) return finished.count_down();
        std::fill(array.begin(), array.end(), left);
        step(left - 1);
      }));
    };
    if (communicator.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    step(50);
    finished.wait();
    EXPECT_EQ(array, Array(3, communicator.size()));
    queue->close();
  });
}

// To wake another thread for them takes longer than they do.
TEST(NamedQueue, SmallOperationsThatComeAloneRunOnOneThread) {
  RankGroup(GroupOptions(TransportKind::kInproc, 2, kSmallStaging)).run([](Communicator& communicator) {
    const auto queue = queue_over(communicator);
    const auto thread_of = [&](std::size_t count, const std::string& name) {
      std::thread::id thread;
      Array array(count, 1);
      Latch finished(1);
      queue->submit(sum_of(array, name, [&](const Error* error, auto) {
        EXPECT_EQ(error, nullptr);
        thread = std::this_thread::get_id();
        finished.count_down();
      }));
      finished.wait();
      EXPECT_EQ(array, Array(count, 2));
      return thread;
    };
    const std::thread::id control = thread_of(1, "one");
    EXPECT_EQ(thread_of(2 * 1024, "few"), control);
    EXPECT_NE(thread_of(16 * 1024, "many"), control);
    queue->close();
  });
}

TEST_P(NamedQueueTest, TheCommunicatorIsFreeMeanwhile) {
  group_.run([](Communicator& communicator) {
    const auto queue = queue_over(communicator);
    const auto other = queue_over(communicator);
    Array first(10, 1);
    Array second(10, 1);
    std::shared_ptr<Work> late;
    if (communicator.rank() == 0) late = submit(*queue, first, "late");
    run_barrier(communicator);
    wait(submit(*other, second, "late"));  // of another queue
    EXPECT_EQ(second, Array(10, communicator.size()));
    if (communicator.rank() != 0) late = submit(*queue, first, "late");
    wait(late);
    EXPECT_EQ(first, Array(10, communicator.size()));
  });
}

INSTANTIATE_TEST_SUITE_P(Groups, NamedQueueTest, ::testing::ValuesIn(all_group_cases()), kPrinted);

}  // namespace
}  // namespace multiring
