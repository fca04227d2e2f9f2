// How long operations wait, who says so, and what an error of a wait that was too short tells.

#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "support/errors.h"
#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

class TimeoutsTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  GroupOptions options(double timeout) const {
    GroupOptions options(GetParam(), 3, kSmallStaging);
    options.communicator.timeout = timeout;
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(Transports, TimeoutsTest, ::testing::ValuesIn(kTransports), kPrinted);

const double kShort = 0.2 * kSlowness;
const double kLong = 20.0 * kSlowness;

// In its own time, whatever the operation's is.
TEST_P(TimeoutsTest, WaitNamesWhoIsLate) {
  RankGroup group(options(kLong));
  Latch waited(2);
  group.run([&](Communicator& communicator) {
    run_barrier(communicator);
    Array array(100, 1);
    if (communicator.rank() == 2) waited.wait();
    const auto first = communicator.submit(sum_in_place(array, "first"), 0, nullptr);
    std::vector<float> others(100, 1.0f);  // of another dtype: not fused with the first one
    const auto second = communicator.submit(sum_in_place(others, "second"), 0, nullptr);
    if (communicator.rank() != 2) {
      const Error error = error_of(
          ErrorKind::kTimeout, [&] { communicator.wait(*first, Deadline::after(kShort), {}); }, "'first'",
          "not complete", "on rank " + std::to_string(communicator.rank()), "for rank 2",
          "was last in barrier", "it goes on");
      EXPECT_EQ(error.context().rank, communicator.rank());
      EXPECT_EQ(error.context().peer, 2);
      EXPECT_EQ(error.context().tensor, "first");
      error_of(
          ErrorKind::kTimeout, [&] { communicator.wait(*second, Deadline::after(0.01), {}); }, "'second'",
          "behind allreduce 'first', which waits for rank 2");
      waited.count_down();
    }
    communicator.wait(*first, Deadline::never(), {});
    communicator.wait(*second, Deadline::never(), {});
    EXPECT_EQ(array.front(), 3);
  });
}

// Who copies into the next segment, and so has not come to it, waits for nobody.
TEST_P(TimeoutsTest, WaitDoesNotBlameItsOwnRank) {
  RankGroup group(options(kLong));
  group.run([&](Communicator& communicator) {
    Array array(500'000, 1);  // about a thousand segments
    const auto work = communicator.submit(sum_in_place(array), 0, nullptr);
    while (!work->done()) {
      try {
        communicator.wait(*work, Deadline::after(0), {});
      } catch (const Error& error) {
        expect_kind(error, ErrorKind::kTimeout);
        ASSERT_NE(error.context().peer, communicator.rank()) << error.what();
      }
    }
  });
}

TEST_P(TimeoutsTest, CanBeMadeShorter) {
  RankGroup group(options(kLong));
  const auto outcomes = group.outcomes([&](Communicator& communicator) {
    communicator.set_timeout(kShort);
    EXPECT_EQ(communicator.timeout(), kShort);
    if (communicator.rank() == 2) return await_broken(communicator);
    Array array(10, 1);
    const auto work = communicator.submit(sum_in_place(array, "short"), 0, nullptr);
    communicator.wait(*work, Deadline::never(), {});
  });
  for (const int rank : {0, 1})
    expect_all_raised({outcomes[static_cast<std::size_t>(rank)]}, ErrorKind::kTimeout, "'short'",
                      "for rank 2");
}

/// Rank 2 comes late to two operations. The first one is not too late for the group's timeout, or for its
/// own.
void come_late(RankGroup& group, bool of_group) {
  group.run([&](Communicator& communicator) {
    if (of_group) communicator.set_timeout(kLong);
    const auto late = [&] {
      if (communicator.rank() == 2) std::this_thread::sleep_for(std::chrono::duration<double>(2 * kShort));
    };
    Array array(10, 1);
    late();
    const auto work = communicator.submit(sum_in_place(array), 0, nullptr, of_group ? -1.0 : kLong);
    communicator.wait(*work, Deadline::never(), {});
    if (of_group) {
      late();
      run(communicator, sum_in_place(array));
      const auto half = communicator.split(0, 0, {});
      EXPECT_EQ(half->timeout(), kLong);
    }
    EXPECT_EQ(array.front(), of_group ? 9 : 3);
  });
}

TEST_P(TimeoutsTest, CanBeMadeLonger) {
  RankGroup group(options(kShort));
  come_late(group, true);
}

TEST_P(TimeoutsTest, OfOneOperation) {
  RankGroup group(options(kShort));
  come_late(group, false);
}

TEST(Timeouts, Usage) {
  RankGroup group(GroupOptions(TransportKind::kInproc, 1));
  group.run([](Communicator& communicator) {
    for (const double wrong : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()})
      expect_usage([&] { communicator.set_timeout(wrong); }, "above 0");
    Array array(1);
    expect_usage([&] { communicator.submit(sum_in_place(array), 0, nullptr, 0.0); }, "above 0");
    EXPECT_FALSE(communicator.is_broken());
  });
}

}  // namespace
}  // namespace multiring
