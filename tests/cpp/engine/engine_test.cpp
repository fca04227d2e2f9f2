// Asynchronous work: order, priorities, fusing, waiting, and threads.

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/choose_work.h"
#include "support/errors.h"
#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

class EngineTest : public GroupTest {};

TEST_P(EngineTest, ManyInFlightWaitedForInAnyOrder) {
  group_.run([](Communicator& communicator) {
    const int size = communicator.size();
    std::vector<Array> arrays;
    std::vector<std::shared_ptr<Work>> works;
    for (std::size_t i = 0; i < 300; ++i) arrays.emplace_back(i * i % 997, static_cast<std::int64_t>(i));
    for (auto& array : arrays)
      works.push_back(communicator.submit(sum_in_place(array, "gradient"), 0, nullptr));
    for (std::size_t i = works.size(); i-- > 0;) {
      const std::size_t at = i * 7 % works.size();
      works[at]->wait(Deadline::never(), {});
      EXPECT_TRUE(works[at]->done());
      EXPECT_EQ(arrays[at], Array(arrays[at].size(), static_cast<std::int64_t>(at) * size));
      works[at]->wait(Deadline::after(0), {});  // again: nothing to wait for
    }
  });
}

// The same shapes without names, other priorities, ranks that are at different places of the same list: what
// is matched has to be the same operation, not one that looks like it.
TEST_P(EngineTest, NamelessWorkOfMixedPrioritiesIsNeverMixedUp) {
  group_.run([](Communicator& communicator) {
    const int size = communicator.size();
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::vector<Array> arrays(24);
      std::vector<std::shared_ptr<Work>> works;
      for (std::size_t i = 0; i < arrays.size(); ++i) {
        // Some are too long to be fused.
        arrays[i].assign(i % 4 == 3 ? 10000 : 10, static_cast<std::int64_t>(i));
        works.push_back(communicator.submit(sum_in_place(arrays[i]), static_cast<int>(i * 5 % 7), nullptr));
        if ((static_cast<int>(i) + repeat) % size == communicator.rank()) std::this_thread::yield();
      }
      for (std::size_t i = 0; i < works.size(); ++i) {
        works[i]->wait(Deadline::never(), {});
        EXPECT_EQ(arrays[i][0], static_cast<std::int64_t>(i) * size);
        EXPECT_EQ(arrays[i].back(), static_cast<std::int64_t>(i) * size);
      }
    }
  });
}

TEST_P(EngineTest, SynchronousCallsComeAfterWhatWasSubmitted) {
  group_.run([](Communicator& communicator) {
    Array array(2000, 1);
    const std::int64_t size = communicator.size();
    std::int64_t expected = 1;
    for (int i = 0; i < 20; ++i) {
      const auto first = communicator.submit(sum_in_place(array), i % 3, nullptr);
      run(communicator, sum_in_place(array));
      EXPECT_TRUE(first->done());
      expected *= size * size;
      if (expected > 1'000'000'000) {
        expected = 1;
        std::fill(array.begin(), array.end(), 1);
        continue;
      }
      ASSERT_EQ(array.front(), expected);
      ASSERT_EQ(array.back(), expected);
    }
  });
}

TEST_P(EngineTest, WaitTimesOutAndTheWorkGoesOn) {
  Latch timed_out(group_.size() - 1);
  group_.run([&](Communicator& communicator) {
    Array array(100, 2);
    if (communicator.rank() == 0) timed_out.wait();
    const auto work = communicator.submit(sum_in_place(array, "late"), 0, nullptr);
    if (communicator.rank() != 0) {
      const Error error =
          error_of(ErrorKind::kTimeout, [&] { work->wait(Deadline::after(0.01), {}); }, "'late'");
      EXPECT_EQ(error.context().tensor, "late");
      EXPECT_FALSE(work->done());
      timed_out.count_down();
    }
    work->wait(Deadline::never(), {});
    EXPECT_EQ(array, Array(100, 2 * communicator.size()));
    EXPECT_FALSE(communicator.is_broken());
  });
}

TEST_P(EngineTest, InterruptEndsOnlyTheWait) {
  Latch interrupted(group_.size() - 1);
  group_.run([&](Communicator& communicator) {
    Array array(100, 2);
    if (communicator.rank() == 0) interrupted.wait();
    const auto work = communicator.submit(sum_in_place(array), 0, nullptr);
    if (communicator.rank() != 0) {
      EXPECT_THROW(work->wait(Deadline::never(), [] { throw std::runtime_error("Ctrl-C"); }),
                   std::runtime_error);
      interrupted.count_down();
    }
    work->wait(Deadline::never(), {});
  });
}

TEST_P(EngineTest, SeveralThreadsOfARankShareACommunicator) {
  group_.run([](Communicator& communicator) {
    // All operations are alike, so any order of the threads is the same order.
    in_threads(3, [&](int) {
      for (int i = 0; i < 50; ++i) {
        Array array(300, 3);
        const auto work = communicator.submit(sum_in_place(array), 0, nullptr);
        in_threads(2, [&](int) { work->wait(Deadline::never(), {}); });
        EXPECT_EQ(array, Array(300, 3 * communicator.size()));
        EXPECT_FALSE(communicator.is_broken());
      }
    });
    in_threads(2, [&](int) {
      for (int i = 0; i < 100; ++i) {
        Array array(300, 1);
        run(communicator, sum_in_place(array));
        EXPECT_EQ(array.front(), communicator.size());
      }
    });
  });
}

// Work that nobody waits for runs all the same, and lets go of what it keeps alive.
TEST_P(EngineTest, ForgottenWorkRuns) {
  group_.run([](Communicator& communicator) {
    Array array(100, 1);
    auto kept = std::make_shared<int>(0);
    const std::weak_ptr<int> alive = kept;
    communicator.submit(sum_in_place(array), 0, std::move(kept));
    run(communicator, barrier_operation());
    EXPECT_EQ(array, Array(100, communicator.size()));
    communicator.close();
    EXPECT_TRUE(alive.expired());
  });
}

// Then the progress thread ends the communicator, and itself.
TEST_P(EngineTest, WorkMayHoldTheLastReference) {
  struct Held {
    ~Held() {
      communicator.reset();
      ended.count_down();
    }
    std::shared_ptr<Communicator> communicator;
    Latch& ended;
  };
  group_.run([](Communicator& communicator) {
    for (const bool fails : {false, true}) {
      Array array(10, 1);
      Latch ended(1);
      auto own = communicator.duplicate(fails ? "fails" : "ends", {});
      if (fails && communicator.rank() == 0 && communicator.size() > 1) array.resize(11);
      auto held = std::make_shared<Held>(own, ended);
      if (communicator.rank() == 0) run_barrier(communicator);  // so it runs when all but one have let go
      own->submit(sum_in_place(array), 0, std::move(held));
      own.reset();
      if (communicator.rank() != 0) run_barrier(communicator);
      ended.wait();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Groups, EngineTest, ::testing::ValuesIn(all_group_cases()), kPrinted);

/// Two ranks of which both have submitted all of a list before its second operation is chosen: the first one
/// has two rounds, and rank 1 is held up between them.
class HeldUp {
 public:
  explicit HeldUp(std::size_t fuse_below) {
    options_.fuse_below = fuse_below;
    options_.stall_warning = 1e-3;
    options_.timeout = 20.0 * kSlowness;
  }

  /// `submit(communicator)` submits the list; returns the rounds that it took without those of the first.
  std::uint64_t run(const std::function<void(Communicator&)>& submit) {
    std::atomic<std::uint64_t> rounds{0};
    RankGroup group(GroupOptions(TransportKind::kInproc, 2, kSmallStaging));
    group.run_transports([&](const std::shared_ptr<Transport>& transport) {
      const bool second = transport->rank() == 1;
      CommunicatorOptions options = options_;
      if (second)
        options.warn = [&](const std::string&) {  // in the progress thread, before rank 0 has come
          waiting_.count_down();
          submitted_.wait();
        };
      Communicator communicator(transport, options);
      std::vector<std::byte> array(kSmallStaging + 64);
      if (!second) waiting_.wait();
      const auto first = communicator.submit(
          allreduce_of(DType::kUInt8, array.size(), array.data(), array.data(), "first"), 1000, nullptr);
      submit(communicator);
      submitted_.count_down();
      run_barrier(communicator);
      if (!second) rounds = transport->arrived(0) - 3;  // the first takes two, the barrier one
    });
    return rounds;
  }

 private:
  CommunicatorOptions options_;
  Latch waiting_{1};
  Latch submitted_{2};
};

TEST(WorkOrder, HighestPriorityFirstThenOrderOfSubmission) {
  std::mutex mutex;
  std::vector<int> done[2];
  HeldUp held_up(0);
  Array arrays[2][6];
  const std::uint64_t rounds = held_up.run([&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    const int priorities[] = {0, 2, 1, 2, -3, 0};
    for (int i = 0; i < 6; ++i) {
      arrays[rank][i].assign(10, i);
      // The work is held by the queue alone, so that it goes when it is done.
      const std::shared_ptr<void> witness(nullptr, [&, rank, i](void*) {
        const std::lock_guard lock(mutex);
        done[rank].push_back(i);
      });
      communicator.submit(sum_in_place(arrays[rank][i]), priorities[i], witness);
    }
  });
  EXPECT_EQ(done[0], (std::vector<int>{1, 3, 2, 0, 5, 4}));
  EXPECT_EQ(done[1], done[0]);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(arrays[1][i], Array(10, 2 * i));
  EXPECT_EQ(rounds, 6u);
}

TEST(WorkOrder, SmallAllreducesShareARound) {
  HeldUp held_up(1000);
  Array arrays[2][20];
  std::vector<float> floats[2];
  const std::uint64_t rounds = held_up.run([&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    for (int i = 0; i < 20; ++i) {
      arrays[rank][i].assign(50, i);
      if (i == 10) {  // another dtype: not fused
        floats[rank].assign(10, 0.5f);
        communicator.submit(sum_in_place(floats[rank]), 0, nullptr);
      }
      communicator.submit(sum_in_place(arrays[rank][i]), 0, nullptr);
    }
  });
  for (int i = 0; i < 20; ++i) EXPECT_EQ(arrays[1][i], Array(50, 2 * i));
  EXPECT_EQ(floats[0], std::vector<float>(10, 1.0f));
  EXPECT_EQ(rounds, 3u);
}

// The ranks share memory, where the order of additions is one; but it has to be the same on all of them.
TEST(WorkOrder, SmallAllreducesOfOneOrderShareARound) {
  HeldUp held_up(1000);
  Array arrays[2][20];
  const std::uint64_t rounds = held_up.run([&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    for (int i = 0; i < 20; ++i) {
      arrays[rank][i].assign(50, i);
      Operation sum = sum_in_place(arrays[rank][i]);
      sum.descriptor.key.order = i < 10 ? Order::kAny : Order::kCanonical;
      communicator.submit(std::move(sum), 0, nullptr);
    }
  });
  for (int i = 0; i < 20; ++i) EXPECT_EQ(arrays[1][i], Array(50, 2 * i));
  EXPECT_EQ(rounds, 2u);
}

}  // namespace
}  // namespace multiring
