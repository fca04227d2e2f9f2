// Callbacks that end a wait (Ctrl-C), and what they may do.

#include <exception>
#include <functional>

#include "support/activities.h"
#include "support/errors.h"

namespace multiring {
namespace {

using namespace testing;

/// What an interrupt raises.
struct CtrlC : std::exception {};

class InterruptTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  static GroupOptions options(int size) { return {GetParam(), size, kSmallStaging}; }
};

// What the callback raises comes out unchanged; the others learn that this rank was interrupted.
TEST_P(InterruptTest, InterruptBreaksTheCommunicatorForAll) {
  for (const Activity& activity : all_activities()) {
    if (activity.name.ends_with("_async")) continue;
    RankGroup group(options(3));
    const std::function<void()> interrupt = [] { throw CtrlC(); };
    group.run([&](Communicator& communicator) {
      if (communicator.rank() == 2) return await_broken(communicator);
      if (communicator.rank() == 0)
        EXPECT_THROW(activity.once(communicator, {-1.0, &interrupt}), CtrlC) << activity.name;
      else
        error_of(
            ErrorKind::kAborted, [&] { activity.once(communicator, {}); },
            "rank 0 stopped all ranks: rank 0 on");
      error_of(ErrorKind::kAborted, [&] { run_barrier(communicator); }, "interrupted");
    });
  }
}

// A signal handler that calls the communicator which it interrupts is refused; the operation goes on.
TEST_P(InterruptTest, InterruptThatCallsBack) {
  RankGroup group(options(2));
  Latch refused(1);
  group.run([&](Communicator& communicator) {
    const std::function<void()> interrupt = [&] {
      error_of(ErrorKind::kUsage, [&] { run_barrier(communicator); }, "signal handler");
      refused.count_down();
    };
    if (communicator.rank() == 1) refused.wait();
    run_barrier(communicator, {-1.0, communicator.rank() == 0 ? &interrupt : nullptr});
    EXPECT_FALSE(communicator.is_broken());
    run_barrier(communicator);
  });
}

TEST_P(InterruptTest, InterruptThatCloses) {
  RankGroup group(options(2));
  Latch closed(1);
  group.run([&](Communicator& communicator) {
    const std::function<void()> interrupt = [&] { communicator.close(); };
    if (communicator.rank() == 0) {
      error_of(ErrorKind::kAborted, [&] { run_barrier(communicator, {-1.0, &interrupt}); }, "closed");
      return closed.count_down();
    }
    closed.wait();
    const auto body = [&] {
      run_barrier(communicator);  // rank 0 has come to the first one
      run_barrier(communicator);
    };
    error_of(ErrorKind::kPeerLost, body, "lost rank 0");
  });
}

TEST_P(InterruptTest, InterruptWhileWaitingForEarlierWork) {
  RankGroup group(options(2));
  group.run([](Communicator& communicator) {
    if (communicator.rank() == 1) return await_broken(communicator);
    Pending pending(communicator);
    const std::function<void()> interrupt = [] { throw CtrlC(); };
    EXPECT_THROW(run_barrier(communicator, {-1.0, &interrupt}), CtrlC);
    pending.expect_all(ErrorKind::kAborted, "interrupted");
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, InterruptTest, ::testing::ValuesIn(kTransports), kPrinted);

}  // namespace
}  // namespace multiring
