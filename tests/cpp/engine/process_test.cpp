// Ranks that are processes: what the others learn when one is killed, exits or forks.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ostream>
#include <string>

#include "support/activities.h"
#include "support/operations.h"
#include "support/processes.h"
#include "support/rank_group.h"

namespace multiring {
namespace {

using testing::Activity;
using testing::Processes;
using Report = testing::Processes::Report;

constexpr int kSize = 3;
constexpr int kVictim = 1;
constexpr double kSoon = 2.0 * testing::kSlowness;

/// All others than the victim have raised peer lost, soon after `since`.
void expect_lost(Processes& processes, double since, const std::string& fragment) {
  bool said = false;
  for (int rank = 0; rank < kSize; ++rank) {
    if (rank == kVictim) continue;
    const Report& report = processes.report(rank);
    ASSERT_TRUE(report.raised) << "nothing was raised on rank " << rank;
    EXPECT_EQ(report.kind, ErrorKind::kPeerLost) << report.text;
    EXPECT_LT(report.at - since, kSoon) << "on rank " << rank;
    const std::string text = report.text;
    EXPECT_NE(text.find("lost rank 1"), std::string::npos) << text;
    said = said || text.find(fragment) != std::string::npos;
  }
  EXPECT_TRUE(said) << "nobody says '" << fragment << "'";
}

struct KillCase {
  Activity activity;
};
void PrintTo(const KillCase& kill, std::ostream* out) { *out << kill.activity.name; }

class KillTest : public ::testing::TestWithParam<KillCase> {};

TEST_P(KillTest, ReachesAllOthers) {
  Processes processes(kSize, [](Communicator& communicator, Report& report) {
    for (;;) {
      GetParam().activity.once(communicator, {});
      ++report.progress;
    }
  });
  ASSERT_TRUE(processes.await_progress(3));
  const double since = Processes::seconds_now();
  processes.kill(kVictim);
  ASSERT_TRUE(processes.wait());
  expect_lost(processes, since, "its process has died");
}

std::vector<KillCase> kill_cases() {
  std::vector<KillCase> cases;
  for (const Activity& activity : testing::all_activities()) cases.push_back({activity});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Activities, KillTest, ::testing::ValuesIn(kill_cases()),
                         [](const auto& info) { return info.param.activity.name; });

void endless_allreduces(Communicator& communicator, Report& report) {
  for (;;) {
    std::vector<float> array(3000, 1.0f);
    Operation operation = testing::allreduce_of(DType::kFloat32, array.size(), array.data(), array.data());
    communicator.run(operation, {});
    ++report.progress;
  }
}

// A child of the killed rank has its sockets open, as data loaders do.
TEST(Processes, DeathIsNoticedThoughAChildOfTheRankLives) {
  Processes processes(kSize, [](Communicator& communicator, Report& report) {
    if (communicator.rank() == kVictim) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::alarm(60);
        for (;;) ::pause();
      }
      report.number = child;
    }
    endless_allreduces(communicator, report);
  });
  ASSERT_TRUE(processes.await_progress(3));
  const pid_t child = processes.report(kVictim).number;
  const double since = Processes::seconds_now();
  processes.kill(kVictim);
  const bool ended = processes.wait();
  EXPECT_EQ(::kill(child, SIGKILL), 0) << "the child was to outlive its parent";
  ASSERT_TRUE(ended);
  expect_lost(processes, since, "its process has died");
}

// Neither closed nor killed: an exit that runs no destructor.
TEST(Processes, ExitWithoutCloseIsNoticed) {
  Processes processes(kSize, [](Communicator& communicator, Report& report) {
    Operation barrier = testing::barrier_operation();
    communicator.run(barrier, {});
    if (communicator.rank() == kVictim) {
      report.at = Processes::seconds_now();
      ::_exit(3);
    }
    endless_allreduces(communicator, report);
  });
  ASSERT_TRUE(processes.wait());
  expect_lost(processes, processes.report(kVictim).at, "its process has died");
}

/// In a child of a plain fork(), of which Python knows nothing: whether every call is refused. Ends the
/// process.
[[noreturn]] void end_as_abandoned_child(Communicator& communicator) {
  int refused = 0;
  const auto expect_refused = [&](const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      refused +=
          error.kind() == ErrorKind::kUsage && std::string(error.what()).find("forked") != std::string::npos;
    }
  };
  float value = 0;
  Operation operation = testing::allreduce_of(DType::kFloat32, 1, &value, &value);
  expect_refused([&] { communicator.run(operation, {}); });
  expect_refused([&] { communicator.submit(std::move(operation), 0, nullptr); });
  expect_refused([&] { communicator.split(0, 0, {}); });
  expect_refused([&] { communicator.allocate_symmetric(8, {}); });
  communicator.close();
  ::_exit(refused);
}

// With a progress thread at work in the parent, which does not exist in the child.
TEST(Processes, ForkedChildIsRefusedAndParentGoesOn) {
  Processes processes(kSize, [](Communicator& communicator, Report& report) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      std::vector<float> array(2000, 1.0f);
      const auto work = communicator.submit(
          testing::allreduce_of(DType::kFloat32, array.size(), array.data(), array.data()), 0, nullptr);
      const pid_t child = ::fork();
      if (child == 0) end_as_abandoned_child(communicator);
      int status = 0;
      ::waitpid(child, &status, 0);
      if (WIFEXITED(status)) report.number += WEXITSTATUS(status);
      work->wait(Deadline::never(), {});
      report.progress += array[1999] == kSize;
    }
  });
  ASSERT_TRUE(processes.wait());
  for (int rank = 0; rank < kSize; ++rank) {
    EXPECT_FALSE(processes.report(rank).raised) << processes.report(rank).text;
    EXPECT_EQ(processes.report(rank).number, 12) << "calls refused on rank " << rank;
    EXPECT_EQ(processes.report(rank).progress, 3);
  }
}

}  // namespace
}  // namespace multiring
