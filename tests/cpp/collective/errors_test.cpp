// Where errors go: to all pending work, to later calls, to the message; and what is no error of the
// communicator.

#include "support/errors.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

class ErrorsTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  static GroupOptions options(int size) { return {GetParam(), size, kSmallStaging}; }
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
    error_of(ErrorKind::kAborted, [&] { run_barrier(communicator); }, "enough");
    error_of(ErrorKind::kAborted, [&] { Pending{communicator}; }, "is broken");
    error_of(ErrorKind::kAborted, [&] { communicator.split(0, 0, {}); }, "is broken");
    error_of(ErrorKind::kAborted, [&] { communicator.allocate_symmetric(8, {}); }, "is broken");
    std::byte byte{};
    Operation receive = make_operation({.kind = OpKind::kReceive, .rows = 1, .output = &byte, .root = 0});
    if (communicator.rank() != 0)
      error_of(ErrorKind::kAborted, [&] { communicator.receive(receive, 0, {}); });
    EXPECT_TRUE(communicator.is_broken());
  });
}

TEST_P(ErrorsTest, TimeoutOfAsynchronousWorkReachesAllPending) {
  GroupOptions short_wait = options(3);
  short_wait.communicator.timeout = 0.5;
  RankGroup group(short_wait);
  group.run([](Communicator& communicator) {
    run_barrier(communicator, {20.0 * kSlowness, nullptr});
    if (communicator.rank() == 1) {
      await_broken(communicator);
      error_of(ErrorKind::kTimeout, [&] { run_barrier(communicator); }, "for rank 1");
    } else {
      Pending pending(communicator);
      // Of rank 0, on another host, rank 2 would know from rank 1, and says so.
      const bool all_here = GetParam() != TransportKind::kCluster;
      pending.expect_all(ErrorKind::kTimeout, all_here ? "for rank 1; ranks 0, 2 came" : "for rank 1");
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

// What waits in the queue fails at once; work in progress when the engine is out of its memory, not before.
TEST_P(ErrorsTest, WorkInProgressFailsWhenItsMemoryIsFree) {
  Latch in_progress(1);
  Latch aborted(1);
  GroupOptions with_warning = options(2);
  with_warning.communicator.stall_warning = 1e-3;
  with_warning.communicator.warn = [&](const std::string&) {  // holds the progress thread up in the operation
    in_progress.count_down();
    aborted.wait();
  };
  RankGroup group(with_warning);
  group.run([&](Communicator& communicator) {
    if (communicator.rank() == 1) return await_broken(communicator);
    Pending pending(communicator);
    in_progress.wait();
    communicator.abort("now");
    EXPECT_TRUE(pending.last().done());
    EXPECT_FALSE(pending.first().done());
    aborted.count_down();
    pending.expect_all(ErrorKind::kAborted, "now");
  });
}

// The same with the sanitizers as the judges.
TEST_P(ErrorsTest, MemoryOfFailedWorkIsTheCallersAgain) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    RankGroup group(options(3));
    std::atomic<bool> running{false};
    group.run([&](Communicator& communicator) {
      std::jthread aborter;
      if (communicator.rank() == 0)
        aborter = std::jthread([&] {
          while (!running) std::this_thread::yield();
          communicator.abort("now");
        });
      try {
        for (;;) {
          auto array = std::make_unique<std::vector<double>>(20000, 1.0);
          const auto work = communicator.submit(
              allreduce_of(DType::kFloat64, array->size(), array->data(), array->data()), 0, nullptr);
          work->wait(Deadline::never(), {});
          running = true;
        }
      } catch (const Error& error) {
        expect_kind(error, ErrorKind::kAborted);
      }
    });
  }
}

// The caller's deadline counts while it waits for what was submitted before, too.
TEST_P(ErrorsTest, DeadlineOfACallBehindWorkThatIsStuck) {
  RankGroup group(options(2));
  group.run([](Communicator& communicator) {
    if (communicator.rank() == 1) return await_broken(communicator);
    Pending pending(communicator);
    error_of(
        ErrorKind::kTimeout, [&] { run_barrier(communicator, {0.05, nullptr}); }, "barrier",
        "allreduce 'pending'", "for what was submitted before it");  // not the deadline of that
    pending.expect_all(ErrorKind::kTimeout, "allreduce 'pending'");
  });
}

TEST_P(ErrorsTest, DeadlineZero) {
  GroupOptions patient = options(2);
  patient.communicator.timeout = 1000;
  RankGroup group(patient);
  const CallOptions none = {0.0, nullptr};
  group.run([&](Communicator& communicator) {
    if (communicator.rank() == 1) return await_broken(communicator);
    const Error error = error_of(ErrorKind::kTimeout, [&] { run_barrier(communicator, none); });
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
    float* const data = array.data();
    for (const Reduction& reduction :
         {Reduction{ReduceOp::kSum}, {ReduceOp::kAverage}, {ReduceOp::kMax, 1.0, 0.5}})
      expect_usage(
          {.dtype = DType::kBool, .rows = 10, .input = data, .output = data, .reduction = reduction});
    for (const int root : {-1, 2})
      for (const OpKind kind : {OpKind::kBroadcast, OpKind::kGather, OpKind::kScatter})
        expect_usage({.kind = kind, .rows = 10, .input = data, .output = data, .root = root});
    constexpr std::uint64_t kHalf = std::uint64_t{1} << 63;  // 2 * (kHalf + 5) is 10 in 64 bits
    for (const auto& splits : {std::vector<std::uint64_t>{10}, {kHalf + 5, kHalf + 5}, {4, 5}})
      expect_usage({.kind = OpKind::kAlltoall, .rows = 10, .input = data, .splits = splits});
    Request overlapping{.kind = OpKind::kAlltoall, .rows = 10, .input = data, .output = data};
    overlapping.output_bytes = 40;
    overlapping.splits = {5, 5};
    expect_usage(overlapping);  // would read what it has written
    expect_usage({.rows = 5, .input = data, .output = data + 2, .output_bytes = 20});
    overlapping.kind = OpKind::kReduceScatter;
    overlapping.output_bytes = 24;
    overlapping.splits.clear();
    expect_usage(overlapping);
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
    for (int repeat = 0; repeat < 2; ++repeat) perform(communicator, request);
  });
  expect_all_raised(outcomes, ErrorKind::kMismatch, "has 116 bytes where the ranks send 120 together");
}

// Half a second: a rank that gets no processor for that long may be named as missing, too.
TEST_P(ErrorsTest, StallWarningNamesWhoIsMissing) {
  GroupOptions with_warning = options(3);
  Warnings warnings(with_warning.communicator, 0.5);
  RankGroup group(with_warning);
  group.run([&](Communicator& communicator) {
    if (communicator.rank() == 1) warnings.await_first();
    run_barrier(communicator);
  });
  ASSERT_GE(warnings.texts.size(), 1u);  // rank 0 speaks for rank 2
  for (const std::string& text : warnings.texts) {
    // Of rank 0, on another host, rank 2 would know from rank 1.
    const std::string unknown = " (nothing is known of rank 0, whose messages come through others)";
    const bool alone = GetParam() == TransportKind::kCluster && text.starts_with("rank 2 on ");
    EXPECT_TRUE(alone || text.starts_with("rank 0 on ")) << text;
    expect_text(text, "barrier");
    expect_text(text, "for rank 1" + (alone ? unknown : "") + "; rank 1 (process ");
    expect_text(text, ") was last in init; set MULTIRING_STALL_WARNING");
  }
}

// Whichever rank is second to send sees the message of the first, and says so before its deadline and at it.
TEST_P(ErrorsTest, SendsThatWaitForEachOtherAreTold) {
  GroupOptions with_warning = options(2);
  Warnings warnings(with_warning.communicator, 0.2);
  with_warning.communicator.timeout = 2.0;
  RankGroup group(with_warning);
  const std::string reason =
      "It sends to this rank as well, and no thread of this rank receives: let one of them receive first.";
  const auto outcomes = group.outcomes([&](Communicator& communicator) {
    run_barrier(communicator, {20.0 * kSlowness, nullptr});
    const Bytes bytes(1 << 20);
    Operation operation = send_of(DType::kUInt8, bytes.size(), bytes.data(), 1 - communicator.rank());
    communicator.send(operation, 0, {});
  });
  int timeouts = 0;
  for (const auto& outcome : outcomes) {
    ASSERT_TRUE(outcome.has_value());
    if (outcome->kind() != ErrorKind::kTimeout) continue;
    ++timeouts;
    expect_text(*outcome, reason);
  }
  EXPECT_GE(timeouts, 1);
  EXPECT_TRUE(std::ranges::any_of(
      warnings.texts, [&](const std::string& text) { return text.find(reason) != std::string::npos; }));
}

INSTANTIATE_TEST_SUITE_P(Transports, ErrorsTest, ::testing::ValuesIn(kTransports), kPrinted);

}  // namespace
}  // namespace multiring
