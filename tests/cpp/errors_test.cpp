// Where errors go: to all pending work, to later calls, to the message; and what is no error of the
// communicator.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "support/activities.h"
#include "support/latch.h"
#include "support/operations.h"
#include "support/rank_group.h"

namespace multiring {
namespace {

using testing::GroupOptions;
using testing::Latch;
using testing::RankGroup;
using testing::Request;
using testing::TransportKind;

/// The error that `body` raises, of the kind expected.
template <class Body>
Error error_of(ErrorKind kind, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error_kind_name(error.kind()), std::string(error_kind_name(kind))) << error.what();
    return error;
  }
  ADD_FAILURE() << "nothing was raised";
  return Error(ErrorKind::kInternal, "");
}

void expect_text(const Error& error, const std::string& fragment) {
  EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos)
      << "no '" << fragment << "' in: " << error.what();
}

void run_barrier(Communicator& communicator, const CallOptions& options = {}) {
  Operation barrier = testing::barrier_operation();
  communicator.run(barrier, options);
}

/// What an interrupt raises.
struct CtrlC : std::exception {};

/// Twenty operations that not all ranks submit.
class Pending {
 public:
  explicit Pending(Communicator& communicator) : arrays_(20, std::vector<float>(3000, 1.0f)) {
    for (auto& array : arrays_) {
      try {
        works_.push_back(communicator.submit(
            testing::allreduce_of(DType::kFloat32, array.size(), array.data(), array.data(), "pending"), 0,
            nullptr));
      } catch (const Error&) {
        if (works_.empty()) throw;
        break;  // the first ones have failed already
      }
    }
  }
  void expect_all(ErrorKind kind, const std::string& fragment) {
    for (const auto& work : works_) {
      for (int repeat = 0; repeat < 2; ++repeat)
        expect_text(error_of(kind, [&] { work->wait(Deadline::never(), {}); }), fragment);
      EXPECT_TRUE(work->done());
    }
  }

 private:
  std::vector<std::vector<float>> arrays_;
  std::vector<std::shared_ptr<Work>> works_;
};

class ErrorsTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  static GroupOptions options(int size) { return {GetParam(), size, testing::kSmallStaging}; }
};

TEST_P(ErrorsTest, AbortReachesAllPendingWork) {
  RankGroup group(options(3));
  Latch submitted(2);
  group.run([&](Communicator& communicator) {
    if (communicator.rank() == 2) {
      submitted.wait();
      communicator.abort("enough");
    } else {
      Pending pending(communicator);
      submitted.count_down();
      pending.expect_all(ErrorKind::kAborted, "rank 2 stopped all ranks: enough");
    }
    expect_text(error_of(ErrorKind::kAborted, [&] { run_barrier(communicator); }), "enough");
    expect_text(error_of(ErrorKind::kAborted, [&] { Pending{communicator}; }), "is broken");
    expect_text(error_of(ErrorKind::kAborted, [&] { communicator.split(0, 0, {}); }), "is broken");
    expect_text(error_of(ErrorKind::kAborted, [&] { communicator.allocate_symmetric(8, {}); }), "is broken");
    std::byte byte{};
    Operation receive =
        testing::make_operation({.kind = OpKind::kReceive, .rows = 1, .output = &byte, .root = 0});
    if (communicator.rank() != 0)
      error_of(ErrorKind::kAborted, [&] { communicator.receive(receive, 0, {}); });
    EXPECT_TRUE(communicator.is_broken());
  });
}

TEST_P(ErrorsTest, TimeoutOfAsynchronousWorkReachesAllPending) {
  GroupOptions short_wait = options(3);
  short_wait.communicator.timeout = 0.1;
  RankGroup group(short_wait);
  group.run([](Communicator& communicator) {
    if (communicator.rank() == 1) {
      while (!communicator.is_broken()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      expect_text(error_of(ErrorKind::kTimeout, [&] { run_barrier(communicator); }), "for rank 1");
    } else {
      Pending pending(communicator);
      pending.expect_all(ErrorKind::kTimeout, "for rank 1; ranks 0, 2 came");
    }
  });
}

TEST_P(ErrorsTest, CloseFailsPendingWorkAndEndsAll) {
  RankGroup group(options(2));
  Latch closed(1);
  group.run([&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      closed.wait();
      // Of several segments, so that rank 0 cannot have done its part of the first one before it closed.
      return Pending(communicator).expect_all(ErrorKind::kPeerLost, "lost rank 0");
    }
    Pending pending(communicator);
    communicator.close();
    communicator.close();
    closed.count_down();
    pending.expect_all(ErrorKind::kAborted, "closed");
    error_of(ErrorKind::kAborted, [&] { run_barrier(communicator); });
  });
}

// Work in progress fails when the engine no longer uses its memory, not before.
TEST_P(ErrorsTest, MemoryOfFailedWorkIsTheCallersAgain) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    RankGroup group(options(3));
    std::atomic<bool> running{false};
    group.run([&](Communicator& communicator) {
      std::thread aborter;
      if (communicator.rank() == 0)
        aborter = std::thread([&] {
          while (!running) std::this_thread::yield();
          communicator.abort("now");
        });
      try {
        for (;;) {
          auto array = std::make_unique<std::vector<double>>(20000, 1.0);
          const auto work = communicator.submit(
              testing::allreduce_of(DType::kFloat64, array->size(), array->data(), array->data()), 0,
              nullptr);
          work->wait(Deadline::never(), {});
          running = true;
        }
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kAborted) << error.what();
      }
      if (aborter.joinable()) aborter.join();
    });
  }
}

// The caller's deadline counts while it waits for what was submitted before, too.
TEST_P(ErrorsTest, DeadlineOfACallBehindWorkThatIsStuck) {
  RankGroup group(options(2));
  group.run([](Communicator& communicator) {
    if (communicator.rank() == 1) {
      while (!communicator.is_broken()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    Pending pending(communicator);
    CallOptions options;
    options.timeout = 0.05;
    const Error error = error_of(ErrorKind::kTimeout, [&] { run_barrier(communicator, options); });
    expect_text(error, "barrier");
    expect_text(error, "allreduce 'pending'");
    EXPECT_LT(error.context().elapsed, 5.0 * testing::kSlowness);
    pending.expect_all(ErrorKind::kTimeout, "allreduce 'pending'");
  });
}

TEST_P(ErrorsTest, DeadlineZero) {
  RankGroup group(options(2));
  CallOptions none;
  none.timeout = 0;
  group.run([&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      while (!communicator.is_broken()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    const Error error = error_of(ErrorKind::kTimeout, [&] { run_barrier(communicator, none); });
    EXPECT_LT(error.context().elapsed, 1.0 * testing::kSlowness);
    EXPECT_EQ(error.context().peer, 1);
    EXPECT_EQ(error.context().operation, "barrier");
  });
  RankGroup alone(options(1));
  alone.run([&](Communicator& communicator) {
    run_barrier(communicator, none);
    EXPECT_NE(communicator.split(0, 0, none), nullptr);
    EXPECT_NE(communicator.allocate_symmetric(10, none), nullptr);
  });
}

// What the callback raises comes out unchanged; the others learn that this rank was interrupted.
TEST_P(ErrorsTest, InterruptBreaksTheCommunicatorForAll) {
  for (const testing::Activity& activity : testing::all_activities()) {
    if (activity.name.ends_with("_async")) continue;
    RankGroup group(options(3));
    const std::function<void()> interrupt = [] { throw CtrlC(); };
    group.run([&](Communicator& communicator) {
      CallOptions with_interrupt;
      if (communicator.rank() == 0) with_interrupt.interrupt = &interrupt;
      if (communicator.rank() == 2) {
        while (!communicator.is_broken()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
      }
      if (communicator.rank() == 0)
        EXPECT_THROW(activity.once(communicator, with_interrupt), CtrlC) << activity.name;
      else
        expect_text(error_of(ErrorKind::kAborted, [&] { activity.once(communicator, {}); }),
                    "rank 0 stopped all ranks: rank 0 on");
      expect_text(error_of(ErrorKind::kAborted, [&] { run_barrier(communicator); }), "interrupted");
    });
  }
}

// A signal handler that calls the communicator which it interrupts is refused; the operation goes on.
TEST_P(ErrorsTest, InterruptThatCallsBack) {
  RankGroup group(options(2));
  Latch refused(1);
  group.run([&](Communicator& communicator) {
    const std::function<void()> interrupt = [&] {
      expect_text(error_of(ErrorKind::kUsage, [&] { run_barrier(communicator); }), "signal handler");
      refused.count_down();
    };
    CallOptions with_interrupt;
    if (communicator.rank() == 0) with_interrupt.interrupt = &interrupt;
    if (communicator.rank() == 1) refused.wait();
    run_barrier(communicator, with_interrupt);
    EXPECT_FALSE(communicator.is_broken());
    run_barrier(communicator);
  });
}

TEST_P(ErrorsTest, InterruptThatCloses) {
  RankGroup group(options(2));
  Latch closed(1);
  group.run([&](Communicator& communicator) {
    const std::function<void()> interrupt = [&] { communicator.close(); };
    CallOptions with_interrupt;
    with_interrupt.interrupt = &interrupt;
    if (communicator.rank() == 0) {
      expect_text(error_of(ErrorKind::kAborted, [&] { run_barrier(communicator, with_interrupt); }),
                  "closed");
      return closed.count_down();
    }
    closed.wait();
    const auto body = [&] {
      run_barrier(communicator);  // rank 0 has come to the first one
      run_barrier(communicator);
    };
    expect_text(error_of(ErrorKind::kPeerLost, body), "lost rank 0");
  });
}

TEST_P(ErrorsTest, InterruptWhileWaitingForEarlierWork) {
  RankGroup group(options(2));
  group.run([](Communicator& communicator) {
    if (communicator.rank() == 1) {
      while (!communicator.is_broken()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    Pending pending(communicator);
    const std::function<void()> interrupt = [] { throw CtrlC(); };
    CallOptions options;
    options.interrupt = &interrupt;
    EXPECT_THROW(run_barrier(communicator, options), CtrlC);
    pending.expect_all(ErrorKind::kAborted, "interrupted");
  });
}

TEST_P(ErrorsTest, UsageErrorsBreakNothing) {
  RankGroup group(options(2));
  group.run([](Communicator& communicator) {
    std::vector<float> array(10);
    const auto expect_usage = [&](Request request) {
      for (const bool asynchronous : {false, true}) {
        Operation operation = make_operation(request);
        error_of(ErrorKind::kUsage, [&] {
          if (asynchronous) communicator.submit(std::move(operation), 0, nullptr);
          if (!asynchronous) communicator.run(operation, {});
        });
      }
    };
    const Request sum{.rows = 10, .input = array.data(), .output = array.data()};
    Request average_of_bool = sum;
    average_of_bool.dtype = DType::kBool;
    average_of_bool.reduction.op = ReduceOp::kAverage;
    expect_usage(average_of_bool);
    Request scaled_bool = sum;
    scaled_bool.dtype = DType::kBool;
    scaled_bool.reduction.postscale = 0.5;
    expect_usage(scaled_bool);
    for (const int root : {-1, 2})
      for (const OpKind kind : {OpKind::kBroadcast, OpKind::kGather, OpKind::kScatter})
        expect_usage({.kind = kind, .rows = 10, .input = array.data(), .output = array.data(), .root = root});
    expect_usage({.kind = OpKind::kAlltoall, .rows = 10, .input = array.data(), .splits = {10}});
    expect_usage({.kind = OpKind::kAlltoall, .rows = 10, .input = array.data(), .splits = {4, 5}});
    expect_usage({.kind = OpKind::kReduceScatter,
                  .rows = 10,
                  .input = array.data(),
                  .output = array.data(),
                  .output_bytes = 24});
    EXPECT_FALSE(communicator.is_broken());
    run_barrier(communicator);
  });
}

// Known only when all have come, so it is the end of the communicator, for the others too.
TEST_P(ErrorsTest, OutputOfTheWrongSizeInTheMiddle) {
  RankGroup group(options(3));
  const auto outcomes = group.outcomes([](Communicator& communicator) {
    std::vector<float> input(10);
    std::vector<float> output(30);
    Request request{.kind = OpKind::kAllgather, .rows = 10, .input = input.data(), .output = output.data()};
    request.output_bytes = communicator.rank() == 1 ? 116 : 120;
    for (int repeat = 0; repeat < 2; ++repeat) {
      Operation operation = make_operation(request);
      communicator.run(operation, {});
    }
  });
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome->kind(), ErrorKind::kMismatch) << outcome->what();
    expect_text(*outcome, "has 116 bytes where the ranks send 120 together");
  }
}

TEST_P(ErrorsTest, StallWarningNamesWhoIsMissing) {
  GroupOptions with_warning = options(3);
  std::mutex mutex;
  std::vector<std::string> warnings;
  Latch warned(2);
  with_warning.communicator.stall_warning = 0.02;
  with_warning.communicator.warn = [&](const std::string& text) {
    const std::lock_guard lock(mutex);
    warnings.push_back(text);
    warned.count_down();
  };
  RankGroup group(with_warning);
  group.run([&](Communicator& communicator) {
    if (communicator.rank() == 1) warned.wait();
    run_barrier(communicator);
  });
  ASSERT_GE(warnings.size(), 2u);
  for (int i = 0; i < 2; ++i) {
    EXPECT_NE(warnings[static_cast<std::size_t>(i)].find("barrier"), std::string::npos) << warnings[0];
    EXPECT_NE(warnings[static_cast<std::size_t>(i)].find("for rank 1"), std::string::npos) << warnings[0];
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, ErrorsTest, ::testing::ValuesIn(testing::kTransports),
                         [](const auto& info) { return testing::transport_name(info.param); });

}  // namespace
}  // namespace multiring
