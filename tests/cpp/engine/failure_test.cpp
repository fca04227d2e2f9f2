// Ranks that die, hang, leave, abort or are interrupted in the middle of every kind of operation: all others
// get an error that says so, and not that of a deadline, which is further away than the test may take.

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "support/activities.h"
#include "support/errors.h"

namespace multiring {
namespace {

using namespace testing;

constexpr int kSize = 4;
constexpr int kVictim = 2;

GroupOptions group_options(TransportKind transport) {
  GroupOptions options(transport, kSize, kSmallStaging);
  options.communicator.timeout = 60 * kSlowness;  // what ends a wait is not this
  options.time_limit = 50 * kSlowness;
  return options;
}

/// How often all ranks have done an activity.
class Progress {
 public:
  void count() { done_.fetch_add(1, std::memory_order_relaxed); }
  void await(int times) const {
    while (done_.load(std::memory_order_relaxed) < times) std::this_thread::yield();
  }

 private:
  std::atomic<int> done_{0};
};

/// Does `activity` again and again until it raises.
Error repeat_until_error(Communicator& communicator, const Activity& activity, Progress& progress) {
  try {
    for (;;) {
      activity.once(communicator, {});
      progress.count();
    }
  } catch (const Error& error) {
    return error;
  }
}

/// Both transports with every activity.
struct FailureCase {
  TransportKind transport;
  Activity activity;
};
void PrintTo(const FailureCase& failure, std::ostream* out) {
  *out << transport_name(failure.transport) << '_' << failure.activity.name;
}

std::vector<FailureCase> failure_cases(const std::vector<TransportKind>& transports) {
  std::vector<FailureCase> cases;
  for (const TransportKind transport : transports)
    for (const Activity& activity : all_activities()) cases.push_back({transport, activity});
  return cases;
}

class FailureTest : public ::testing::TestWithParam<FailureCase> {
 protected:
  FailureTest() : group_(group_options(GetParam().transport)), errors_(kSize) {}

  /// All ranks are at the activity when `fault` strikes, in a thread of its own.
  void strike(const std::function<void()>& fault) {
    const std::jthread striker([&] {
      progress_.await(3 * kSize);
      fault();
    });
    group_.run([&](Communicator& communicator) {
      const auto rank = static_cast<std::size_t>(communicator.rank());
      {
        const std::lock_guard lock(mutex_);
        communicators_[rank] = communicator.shared_from_this();
      }
      errors_[rank] = repeat_until_error(communicator, GetParam().activity, progress_);
      EXPECT_TRUE(communicator.is_broken() || communicator.rank() == kVictim);
    });
  }

  /// The striker's own reference: the ranks may be through before it is.
  std::shared_ptr<Communicator> communicator(int rank) {
    const std::lock_guard lock(mutex_);
    return communicators_[static_cast<std::size_t>(rank)];
  }

  /// On all ranks but the victim, or with it.
  template <class... Fragments>
  void expect_all(ErrorKind kind, bool of_victim, const Fragments&... fragments) {
    for (int rank = 0; rank < kSize; ++rank) {
      if (rank != kVictim || of_victim)
        expect_all_raised({errors_[static_cast<std::size_t>(rank)]}, kind, fragments...);
    }
  }

  RankGroup group_;
  Progress progress_;
  std::vector<std::optional<Error>> errors_;  // of each rank

 private:
  std::mutex mutex_;  // guards communicators_
  std::array<std::shared_ptr<Communicator>, kSize> communicators_;
};

// The other transport's ranks can die for good: see tests/faults/test_kill.py.
using InprocFailureTest = FailureTest;

TEST_P(InprocFailureTest, DeathReachesAllOthers) {
  strike([&] { group_.hub().break_rank(kVictim); });
  expect_all(ErrorKind::kPeerLost, false, "rank 2");
  bool died = false;
  for (const auto& error : errors_)
    died = died || std::string(error->what()).find("its process has died") != std::string::npos;
  EXPECT_TRUE(died);
}

INSTANTIATE_TEST_SUITE_P(Activities, InprocFailureTest,
                         ::testing::ValuesIn(failure_cases({TransportKind::kInproc})), kPrinted);

TEST_P(FailureTest, AbortFromAnotherThreadReachesAll) {
  strike([&] { communicator(kVictim)->abort("the user wants to stop"); });
  expect_all(ErrorKind::kAborted, true, "the user wants to stop");
  expect_all(ErrorKind::kAborted, false, "rank 2 stopped all ranks");
}

// Closing ends this rank's own call; the others learn of that, or that the rank has left.
TEST_P(FailureTest, CloseFromAnotherThreadEndsTheCall) {
  strike([&] { communicator(kVictim)->close(); });
  for (const auto& error : errors_) {
    const bool left = error->kind() == ErrorKind::kPeerLost;
    expect_kind(*error, left ? ErrorKind::kPeerLost : ErrorKind::kAborted);
    expect_text(*error, left ? "shut down" : "closed");
  }
}

TEST_P(FailureTest, LeavingReachesAllWhoWait) {
  group_.run([&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    GetParam().activity.once(communicator, {});
    if (communicator.rank() == kVictim) return communicator.close();
    errors_[rank] = repeat_until_error(communicator, GetParam().activity, progress_);
  });
  expect_all(ErrorKind::kPeerLost, false, "it has shut down or exited while others still needed it",
             "lost rank 2");
}

INSTANTIATE_TEST_SUITE_P(Activities, FailureTest,
                         ::testing::ValuesIn(failure_cases({TransportKind::kInproc, TransportKind::kShm})),
                         kPrinted);

// Ranks that come late at every round, each by its own time, change nothing but the time.
TEST(Delays, DoNotChangeResults) {
  RankGroup group(group_options(TransportKind::kInproc));
  const auto staged = make_problem(DType::kBFloat16, {ReduceOp::kSum}, 9000, kSize);
  const auto direct = make_problem(DType::kFloat32, {ReduceOp::kAverage}, 9000, kSize);
  for (int late = 0; late < kSize; ++late) {
    for (int rank = 0; rank < kSize; ++rank)
      group.hub().delay(rank, std::chrono::microseconds(rank == late ? 300 : 40 * rank));
    group.run([&](Communicator& communicator) {
      const auto region = communicator.allocate_symmetric(direct.bytes(), {});
      for (int repeat = 0; repeat < 3; ++repeat) {
        expect_reduced(communicator, staged, kCallModes[repeat % 2]);
        expect_reduced(communicator, direct, kCallModes[repeat % 2], region->part(communicator.rank()));
      }
    });
  }
}

// An operation of many rounds has one deadline, not one for each round.
TEST(Delays, CountAgainstOneDeadline) {
  GroupOptions options(TransportKind::kInproc, 2, 4096);
  options.communicator.timeout = 0.3;
  RankGroup group(options);
  group.hub().delay(1, std::chrono::milliseconds(30));
  const auto outcomes = group.outcomes([&](Communicator& communicator) {
    std::vector<float> array(64 * 1024, 1.0f);  // 64 segments
    run(communicator, sum_in_place(array));
  });
  expect_all_raised(outcomes, ErrorKind::kTimeout);
  for (const auto& outcome : outcomes)
    EXPECT_EQ(std::string(outcome->what()).find("waited 0.0 s"), std::string::npos) << outcome->what();
}

// Nobody learns what a rank does: all, this one too, wait until the deadline, and the missing one is named.
TEST(Drops, EndInTimeoutsThatNameTheDroppedRank) {
  for (const Activity& activity : all_activities()) {
    if (activity.name.ends_with("_async")) continue;  // the same rounds
    const bool messages = activity.name == "send_receive";
    GroupOptions options = group_options(TransportKind::kInproc);
    options.communicator.timeout = 0.15;
    RankGroup group(options);
    group.hub().drop(kVictim);
    const auto outcomes = group.outcomes([&](Communicator& communicator) {
      for (;;) activity.once(communicator, {});
    });
    SCOPED_TRACE(activity.name);
    expect_all_raised(outcomes, ErrorKind::kTimeout, messages ? "for rank " : "Rank 2 (process ");
  }
}

}  // namespace
}  // namespace multiring
