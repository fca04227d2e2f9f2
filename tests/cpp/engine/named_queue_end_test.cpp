// How a named queue ends: mismatches, what one rank leaves out, ranks that leave or die, close.

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/named.h"

namespace multiring {
namespace {

using namespace testing;

GroupOptions impatient(int size, double timeout) {
  GroupOptions options(TransportKind::kInproc, size, kSmallStaging);
  options.communicator.timeout = timeout * kSlowness;
  return options;
}

using Queue = std::shared_ptr<NamedQueue>;

constexpr std::size_t kLarge = 16 * 1024;  // elements of an operation that runs on the thread of its own

/// Runs `body` on all ranks, each of which has a queue and an array.
void on_queues(const GroupOptions& options,
               const std::function<void(Communicator&, const Queue&, Array&)>& body) {
  RankGroup(options).run([&](Communicator& communicator) {
    const auto queue = queue_over(communicator);
    Array array(4, 1);
    body(communicator, queue, array);
  });
}

TEST(NamedQueueErrors, AMismatchReachesEveryRank) {
  on_queues(impatient(3, 20), [](Communicator& communicator, const Queue& queue, Array& array) {
    Array other(7, 1);
    if (communicator.rank() == 1) array.push_back(1);
    const auto pending = submit(*queue, other, numbered("pending ", communicator.rank()));
    error_of_work(ErrorKind::kMismatch, submit(*queue, array, "weights"),
                  "rank 1 asked for allreduce 'weights' sum int64[5, 1]",
                  "ranks 0, 2 asked for allreduce 'weights' sum int64[4, 1]");
    error_of_work(ErrorKind::kMismatch, pending);  // fails with the first error
    EXPECT_TRUE(queue->is_broken());
    error_of(
        ErrorKind::kAborted, [&] { submit(*queue, array, "more"); },
        numbered("is broken on rank ", communicator.rank()));
    EXPECT_FALSE(communicator.is_broken());
  });
}

// All of them are fused into one operation, whose description would not even reach the one that differs.
TEST(NamedQueueErrors, AMismatchAmongManyNamesTheOne) {
  on_queues(impatient(3, 20), [](Communicator& communicator, const Queue& queue, Array&) {
    std::vector<Array> arrays;
    for (int i = 0; i < 40; ++i) arrays.emplace_back(i == 19 && communicator.rank() == 1 ? 5 : 4, 1);
    NamedRequest request;
    request.name = "bucket";
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      Operation operation = std::move(sum_of(arrays[i], "bucket").operations[0]);
      operation.descriptor.set_name(numbered("layer ", i));
      request.operations.push_back(std::move(operation));
    }
    const auto works = queue->submit(std::move(request));
    for (const std::size_t i : {19, 20, 39})
      error_of_work(ErrorKind::kMismatch, works[i], "rank 1 asked for allreduce 'layer 19' sum int64[5, 1]",
                    "ranks 0, 2 asked for allreduce 'layer 19' sum int64[4, 1]");
  });
}

TEST(NamedQueueErrors, GroupsOfDifferentLengthAreAMismatch) {
  on_queues(impatient(2, 20), [](Communicator& communicator, const Queue& queue, Array& array) {
    NamedRequest request = sum_of(array, "bucket");
    if (communicator.rank() == 1) request.operations.push_back(barrier_operation());
    for (const auto& work : queue->submit(std::move(request)))
      error_of_work(ErrorKind::kMismatch, work, "'bucket': rank 0 submitted 1; rank 1 submitted 2");
  });
}

// The ranks go on with rounds, for each has something that waits.
TEST(NamedQueueErrors, DifferentNamesTimeOutAndSaySo) {
  on_queues(impatient(3, 0.3), [](Communicator& communicator, const Queue& queue, Array& array) {
    // Rank 1 waits for both, or for the one that had not come to the round in which the time was over.
    error_of_work(ErrorKind::kTimeout, submit(*queue, array, communicator.rank() == 1 ? "grad/b" : "grad/a"),
                  "ranks 0, 2 submitted 'grad/a' and wait for rank 1, which has not submitted it",
                  "rank 1 submitted 'grad/b' and waits for rank");
    error_of(ErrorKind::kAborted, [&] { submit(*queue, array, "grad/c"); });
  });
}

// The others sleep, for nothing of theirs waits.
TEST(NamedQueueErrors, AnAbsentRankIsWaitedForAndNamed) {
  Latch over(1);
  on_queues(impatient(3, 0.3), [&](Communicator& communicator, const Queue& queue, Array& array) {
    if (communicator.rank() == 2) {
      over.wait();
      error_of_work(ErrorKind::kTimeout, submit(*queue, array, "other"), "stopped all ranks");
      return;
    }
    error_of_work(ErrorKind::kTimeout, submit(*queue, array, "grad/a"), "submitted 'grad/a' and wait",
                  "for rank 2, which has not submitted it",
                  "Rank 2 (process 2, alive) waits for nothing in this queue");
    over.count_down();
  });
}

TEST(NamedQueueErrors, StallsAreWarnedOfOnce) {
  std::mutex mutex;
  std::vector<std::string> warnings;
  GroupOptions options = impatient(2, 20);
  options.communicator.stall_warning = 0.05;
  Latch once(1);
  Latch twice(2);
  options.communicator.warn = [&](const std::string& text) {
    if (text.rfind("rank 0 ", 0) != 0 || text.find("in named queue") == std::string::npos) return;
    const std::lock_guard lock(mutex);
    warnings.push_back(text);
    once.count_down();
    twice.count_down();
  };
  on_queues(options, [&](Communicator& communicator, const Queue& queue, Array& array) {
    Array other(4, 1);
    if (communicator.rank() == 1) twice.wait();
    const auto slow = submit(*queue, array, "slow");
    once.wait();
    // When this is warned of, "slow" has been looked at many times since.
    wait(submit(*queue, other, "slower"));
    wait(slow);
    EXPECT_EQ(array, Array(4, 2));
  });
  ASSERT_EQ(warnings.size(), 2u);
  expect_text(warnings[0], "rank 0 submitted 'slow' and waits for rank 1");
  expect_text(warnings[0], "MULTIRING_STALL_WARNING");
}

TEST(NamedQueueErrors, ARankThatLeavesOrDies) {
  for (const bool dies : {false, true}) {
    RankGroup group(impatient(3, 60));
    Latch submitted(2);
    Latch over(2);
    group.run([&](Communicator& communicator) {
      const auto queue = queue_over(communicator);
      Array array(4, 1);
      if (communicator.rank() == 1) {
        submitted.wait();
        if (dies) {
          group.hub().break_rank(1);
          return over.wait();  // a dead rank closes nothing
        }
        queue->close();
        queue->close();
        error_of(ErrorKind::kAborted, [&] { submit(*queue, array, "x"); }, "is closed on rank 1");
        return;
      }
      const auto work = submit(*queue, array, "grad/a");
      submitted.count_down();
      error_of_work(ErrorKind::kPeerLost, work, "lost rank 1", "'grad/a'",
                    dies ? "died" : "shut down or exited");
      over.count_down();
    });
  }
}

TEST(NamedQueueErrors, AbortReachesEveryRank) {
  on_queues(impatient(3, 60), [&](Communicator& communicator, const Queue& queue, Array& array) {
    const auto work = submit(*queue, array, numbered("x", communicator.rank()));
    if (communicator.rank() == 2) queue->abort(Error(ErrorKind::kAborted, "enough"));
    error_of_work(ErrorKind::kAborted, work, "enough");
  });
}

TEST(NamedQueueErrors, CloseEndsWhatIsPending) {
  on_queues(impatient(2, 60), [&](Communicator& communicator, const Queue& queue, Array& array) {
    int ended = 0;
    std::optional<Error> raised;
    queue->submit(sum_of(array, numbered("x", communicator.rank()), [&](const Error* error, auto) {
      ++ended;
      ASSERT_NE(error, nullptr);
      raised = *error;
      EXPECT_FALSE(queue->close());  // only begins, here
    }));
    run_barrier(communicator);
    if (communicator.rank() == 0) {
      EXPECT_TRUE(queue->close());
      ASSERT_EQ(ended, 1);
      expect_kind(*raised, ErrorKind::kAborted);
      expect_text(*raised, "was closed before 'x0' was matched");
    }
    run_barrier(communicator);
    queue->close();
    ASSERT_EQ(ended, 1);
    if (communicator.rank() == 1 && raised->kind() != ErrorKind::kAborted)
      expect_kind(*raised, ErrorKind::kPeerLost);
  });
}

// The threads are not waited for there; but what waits for peers ends, and the peers learn of it.
TEST(NamedQueueErrors, CloseInACallbackEndsWhatIsPending) {
  on_queues(impatient(2, 60), [](Communicator& communicator, const Queue& queue, Array& array) {
    Array other(4, 1);
    const auto pending = submit(*queue, other, numbered("x", communicator.rank()));
    queue->submit(sum_of(array, "last", [&](const Error* error, auto) {
      EXPECT_EQ(error, nullptr);
      EXPECT_TRUE(communicator.rank() == 0 || !queue->close());
    }));
    if (communicator.rank() == 1)
      error_of_work(ErrorKind::kAborted, pending, "was closed before 'x1' was matched");
    else
      error_of_work(ErrorKind::kPeerLost, pending, "lost rank 1");
    EXPECT_TRUE(queue->close());  // before the arrays go
  });
}

// The control thread warns of what is not matched, the data communicator's of what does not arrive.
TEST(NamedQueueErrors, CloseInAWarningOnlyBegins) {
  for (const bool matched : {false, true}) {
    std::weak_ptr<NamedQueue> closing;
    std::mutex mutex;
    Latch warned(1);
    Latch ended(1);
    GroupOptions options = impatient(2, 60);
    options.communicator.stall_warning = 0.05;
    options.communicator.warn = [&](const std::string& text) {
      if (text.rfind("rank 0 ", 0) != 0 || text.find("'second'") == std::string::npos) return;
      const std::lock_guard lock(mutex);
      if (const auto queue = closing.lock()) {
        EXPECT_FALSE(queue->close());
        warned.count_down();
      }
    };
    RankGroup group(options);
    group.run([&](Communicator& communicator) {
      const auto queue = queue_over(communicator);
      Array array(kLarge, 1);
      Array other(4, 1);
      if (communicator.rank() == 0) {
        const std::lock_guard lock(mutex);
        closing = queue;
      }
      run_barrier(communicator);
      if (communicator.rank() == 1) {
        if (!matched) return warned.wait();
        // Its callback holds up the thread that the second one needs.
        queue->submit(sum_of(array, "first", [&](const Error*, auto) { ended.wait(); }));
        Latch over(1);  // with a result, for rank 0 has brought its part, or without
        queue->submit(sum_of(other, "second", [&](const Error*, auto) { over.count_down(); }));
        return over.wait();
      }
      if (matched) wait(submit(*queue, array, "first"));
      error_of_work(ErrorKind::kAborted, submit(*queue, other, "second"));
      ended.count_down();
      EXPECT_TRUE(queue->close());
    });
  }
}

// It runs on the control thread, and its peer's part of it waits behind a callback.
TEST(NamedQueueErrors, CloseEndsASmallOperationInProgress) {
  Latch ended(1);
  on_queues(impatient(2, 60), [&](Communicator& communicator, const Queue& queue, Array& array) {
    Array large(kLarge, 1);
    if (communicator.rank() == 1) {
      queue->submit(sum_of(large, "large", [&](const Error*, auto) { ended.wait(); }));
      Latch over(1);  // with a result, for rank 0 has brought its part, or without
      queue->submit(sum_of(array, "small", [&](const Error*, auto) { over.count_down(); }));
      run_barrier(communicator);
      return over.wait();
    }
    wait(submit(*queue, large, "large"));
    const auto work = submit(*queue, array, "small");
    run_barrier(communicator);
    EXPECT_TRUE(queue->close());
    error_of_work(ErrorKind::kAborted, work, "closed");
    ended.count_down();
  });
}

TEST(NamedQueueErrors, WhatACallbackRaisesBreaksTheQueue) {
  on_queues(impatient(2, 20), [&](Communicator& communicator, const Queue& queue, Array& array) {
    Array other(4, 1);
    Latch ended(1);  // its arrays are in use until then
    queue->submit(sum_of(array, "bad", [&](const Error*, auto) {
      ended.count_down();
      if (communicator.rank() == 1) throw std::runtime_error("no such kernel");
    }));
    error_of_work(ErrorKind::kInternal, submit(*queue, other, numbered("y", communicator.rank())),
                  "the completion callback of 'bad' raised: no such kernel");
    ended.wait();
    queue->close();
  });
}

TEST(NamedQueueErrors, UsageErrorsBreakNothing) {
  RankGroup group(impatient(2, 20));
  group.run([&](Communicator& communicator) {
    error_of(ErrorKind::kUsage, [&] { NamedQueue::create(communicator, "", {}); });
    const auto queue = queue_over(communicator);
    Array array(4, 1);
    error_of(ErrorKind::kUsage, [&] { submit(*queue, array, ""); });
    error_of(ErrorKind::kUsage, [&] { submit(*queue, array, std::string(5000, 'n')); });
    for (const OpKind kind : {OpKind::kSend, OpKind::kBroadcast, OpKind::kAllreduce}) {
      NamedRequest request = sum_of(array, "x");
      request.operations[0].descriptor.key.kind = kind;
      if (kind == OpKind::kBroadcast) request.operations[0].descriptor.key.root = 2;
      if (kind == OpKind::kAllreduce) request.operations.clear();
      error_of(ErrorKind::kUsage, [&] { queue->submit(std::move(request)); });
    }
    wait(submit(*queue, array, "x"));
    EXPECT_EQ(array, Array(4, 2));
  });
}

TEST(NamedQueueErrors, QueuesOfDifferentNamesAreAMismatch) {
  RankGroup group(impatient(2, 20));
  const auto outcomes = group.outcomes([&](Communicator& communicator) {
    NamedQueue::create(communicator, communicator.rank() == 0 ? "a" : "b", {});
  });
  expect_all_raised(outcomes, ErrorKind::kMismatch);
}

// Queues closed and destroyed at any moment, with and without something in flight.
TEST(NamedQueueErrors, AnyMomentIsGoodToEnd) {
  RankGroup group(impatient(3, 60));
  group.run([&](Communicator& communicator) {
    for (int repeat = 0; repeat < 40; ++repeat) {
      const auto queue = queue_over(communicator);
      std::vector<Array> arrays(20, Array(300, 1));
      std::vector<std::shared_ptr<Work>> works;
      std::atomic<int> ended{0};
      int accepted = 0;
      std::thread closer([&] {
        std::this_thread::sleep_for(std::chrono::microseconds(repeat * 20 * (1 + communicator.rank())));
        queue->close();
      });
      for (std::size_t i = 0; i < arrays.size(); ++i) {
        try {
          queue->submit(sum_of(arrays[i],
                               numbered("n", (i * 7 + static_cast<std::size_t>(repeat)) % arrays.size()),
                               [&](const Error*, auto) { ++ended; }));
          ++accepted;
        } catch (const Error&) {
          break;
        }
      }
      closer.join();
      EXPECT_EQ(ended, accepted);
    }
  });
}

}  // namespace
}  // namespace multiring
