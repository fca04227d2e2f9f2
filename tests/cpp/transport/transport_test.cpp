// The transports below the collectives: connecting, symmetric memory that cannot be had, rounds, mailboxes.

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "support/errors.h"
#include "support/network/tcp_group.h"
#include "transport/shared/wait_point.h"
#include "transport/shm/shm_transport.h"
#include "transport/world/connect_world.h"

namespace multiring {
namespace {

using namespace testing;

ShmOptions shm_options(int rank, int size) {
  ShmOptions options;
  options.rank = rank;
  options.size = size;
  return options;
}

TEST(ShmConnect, DeadlineNamesWhoHasNotCome) {
  InprocStore store;
  Latch both(2);
  in_threads(2, [&](int index) {
    both.arrive_and_wait();
    const auto connect = [&] {  // long enough for these two to meet
      connect_shm(store, shm_options(2 * index, 3), wait_seconds(1));
    };
    const Error error = error_of(ErrorKind::kTimeout, connect, "init for rank 1 of 3");
    EXPECT_EQ(error.context().peer, 1);
  });
}

TEST(ShmConnect, InterruptEndsIt) {
  InprocStore store;
  const std::function<void()> interrupt = [] { throw std::runtime_error("Ctrl-C"); };
  WaitOptions waiting = wait_seconds(30);
  waiting.interrupt = &interrupt;
  EXPECT_THROW(connect_shm(store, shm_options(0, 2), waiting), std::runtime_error);
}

TEST(ShmConnect, OtherSettingsAreRefused) {
  InprocStore store;
  in_threads(2, [&](int rank) {
    ShmOptions options = shm_options(rank, 2);
    if (rank == 0) options.transport.staging_bytes = 8192;
    expect_usage([&] { connect_shm(store, options, wait_seconds(20)); }, "other settings");
  });
}

TEST(ShmConnect, LeavesNothingInTheSocketDirectory) {
  std::string directory = (std::filesystem::temp_directory_path() / "multiring-test-XXXXXX").string();
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  InprocStore store;
  in_threads(3, [&](int rank) {
    ShmOptions options = shm_options(rank, 3);
    options.socket_directory = directory;
    connect_shm(store, options, wait_seconds(20));
  });
  EXPECT_TRUE(std::filesystem::is_empty(directory));
  std::filesystem::remove(directory);
}

/// What two ranks of different builds raise, who meet by `join(rank, store, build)`.
template <class Join>
void expect_builds_refused(const Join& join) {
  InprocStore store;
  in_threads(2, [&](int rank) {
    const std::string build = "multiring 0." + std::to_string(rank + 1) + ".0 (protocol 4.424)";
    error_of(
        ErrorKind::kUsage, [&] { join(rank, store, build); }, "multiring 0.1.0 (protocol",
        "multiring 0.2.0 (protocol");
  });
}

TEST(Builds, ThatDifferAreRefusedOnOneHost) {
  expect_builds_refused([](int rank, Store& store, const std::string& build) {
    ShmOptions options = shm_options(rank, 2);
    options.build = build;
    connect_shm(store, options, wait_seconds(20));
  });
}

TEST(Builds, ThatDifferAreRefusedBetweenHosts) {
  expect_builds_refused([](int rank, Store& store, const std::string& build) {
    WorldAddress address;
    address.rank = rank;
    address.size = 2;
    address.spread = true;
    address.host = "host" + std::to_string(rank);
    address.secret = "the secret of the tests";
    address.build = build;
    connect_world(std::shared_ptr<Store>(&store, [](Store*) {}), address, wait_seconds(20));
  });
}

class TransportTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  static GroupOptions options(int size) { return {GetParam(), size, 4096}; }
};

TEST_P(TransportTest, HeadersAndStagingAreZeroAtFirstAndSeenByAll) {
  RankGroup group(options(4));
  group.run_transports([](const std::shared_ptr<Transport>& transport) {
    const int rank = transport->rank();
    for (std::uint64_t round = 1; round <= 5; ++round) {
      EXPECT_TRUE(round > 2 || *transport->header(rank, round) == std::byte{0});
      EXPECT_TRUE(round > 2 || *transport->staging(rank, round) == std::byte{0});
      const auto mark = static_cast<int>(round) * 10 + rank;
      std::memset(transport->header(rank, round), mark, Transport::kUserHeaderBytes);
      std::memset(transport->staging(rank, round), mark, transport->staging_bytes());
      transport->arrive(round, transport->staging_bytes());
      ASSERT_TRUE(transport->await_all(round, wait_seconds(20)).ok());
      for (int peer = 0; peer < transport->size(); ++peer) {
        const auto theirs = static_cast<std::byte>(static_cast<int>(round) * 10 + peer);
        EXPECT_GE(transport->arrived(peer), round);
        EXPECT_EQ(transport->header(peer, round)[Transport::kUserHeaderBytes - 1], theirs);
        EXPECT_EQ(transport->staging(peer, round)[transport->staging_bytes() - 1], theirs);
      }
    }
  });
}

TEST_P(TransportTest, StagingMemoryIsAtLeastACacheLine) {
  RankGroup group(GroupOptions(GetParam(), 2, 63));
  error_of(ErrorKind::kUsage, [&] { group.run_transports([](const std::shared_ptr<Transport>&) {}); });
}

// The first rank to come may be gone again when the last one comes: its farewell has to be there for that
// one.
TEST_P(TransportTest, WhoLeavesAtOnceIsKnownToHaveLeft) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    RankGroup group(options(3));
    std::vector<std::string> addresses(3);
    Latch opened(3);
    group.run_transports([&](const std::shared_ptr<Transport>& transport) {
      const std::vector<int> members = {2, 0, 1};
      auto child = transport->subgroup(members, 1, wait_seconds(20));
      addresses[static_cast<std::size_t>(child->rank())] = child->addresses();
      opened.arrive_and_wait();
      child->learn_addresses(addresses);
      transport->connect_subgroup(*child, wait_seconds(20));
      if (transport->rank() != 1) return child.reset();
      child->arrive(1, 0);
      const WaitResult result = child->await_all(1, wait_seconds(20));
      EXPECT_EQ(result.outcome, WaitResult::Outcome::kPeerLost);
      EXPECT_TRUE(result.peer_left);
    });
  }
}

TEST_P(TransportTest, FirstAbortWinsAndIsCutToItsRecord) {
  RankGroup group(options(3));
  group.run_transports([](const std::shared_ptr<Transport>& transport) {
    transport->arrive(1, 0);  // all are connected
    const WaitResult met = transport->await_all(1, wait_seconds(20));
    // Rank 1 may have met the others, and have aborted, before these have met each other.
    const bool aborted = transport->rank() != 1 && met.outcome == WaitResult::Outcome::kAborted;
    ASSERT_TRUE(met.ok() || aborted);
    ErrorContext about;
    about.common = 2;
    about.odd = 1;
    about.operation = "allreduce";
    about.tensor = std::string(5000, 'n');
    if (transport->rank() == 1) transport->abort(Error(ErrorKind::kTimeout, std::string(10000, 'x'), about));
    transport->arrive(2, 0);
    transport->await_all(2, wait_seconds(20));
    transport->abort(Error(ErrorKind::kMismatch, "late"));
    const AbortRecord record = abort_of(*transport, ErrorKind::kTimeout, 1);
    EXPECT_EQ(record.message, std::string(4095, 'x'));
    EXPECT_EQ(record.about.common, 2);
    EXPECT_EQ(record.about.odd, 1);
    EXPECT_EQ(record.about.operation, "allreduce");
    EXPECT_EQ(record.about.tensor, std::string(AbortRecord::kTensorBytes, 'n'));
  });
}

// The receiver of a message of many chunks takes some of them and is no more.
TEST_P(TransportTest, PeerThatLeavesInTheMiddleOfAMessage) {
  RankGroup group(options(2));
  group.run_transports([](const std::shared_ptr<Transport>& transport) {
    if (transport->rank() == 1) {
      for (std::uint64_t chunk = 1; chunk <= 3; ++chunk) {
        ASSERT_TRUE(transport->await_written(0, chunk, wait_seconds(20)).ok());
        transport->mailbox_read(0, chunk);
      }
      return transport->leave();
    }
    WaitResult result;
    std::uint64_t chunk = 0;
    while (result.ok()) {
      ++chunk;
      result = transport->await_read(1, chunk > 2 ? chunk - 2 : 0, wait_seconds(20));
      if (result.ok()) transport->mailbox_written(1, chunk, 1);
    }
    expect_lost(result, 1, true);
    EXPECT_EQ(chunk, 6u);
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, TransportTest, ::testing::ValuesIn(kTransports), kPrinted);

TEST(SpinBudget, LongWaitsTakeItAndOneShortWaitGivesItBack) {
  SpinBudget budget(25, 1000);
  EXPECT_EQ(budget.spins(), 1000U);
  budget.was_long();
  EXPECT_EQ(budget.spins(), 500U);
  for (int i = 0; i < 10; ++i) budget.was_long();
  EXPECT_EQ(budget.spins(), 25U);
  budget.was_short();
  EXPECT_EQ(budget.spins(), 1000U);
}

// The rank that makes the memory fails; the others wait for a descriptor that never comes.
TEST(ShmAllocate, FailureOfTheRankThatMakesTheMemoryReachesAll) {
  RankGroup group(GroupOptions(TransportKind::kShm, 2));
  const auto outcomes = group.outcomes(
      [](Communicator& communicator) { communicator.allocate_symmetric(std::size_t{1} << 55, {}); });
  expect_all_raised(outcomes, ErrorKind::kInternal, "shared memory");
}

// 2^62 + 1 bytes for each of 4 ranks are 4 bytes more than 64 bits count: too little would be mapped.
TEST(ShmAllocate, RefusesWhatHasNoAddresses) {
  RankGroup group(GroupOptions(TransportKind::kShm, 4));
  group.run([](Communicator& communicator) {
    for (const std::size_t bytes : {(std::size_t{1} << 62) + 1, ~std::size_t{0}})
      expect_usage([&] { communicator.allocate_symmetric(bytes, {}); }, "has no addresses");
    run_barrier(communicator);  // it is a usage error of all: nothing is broken
  });
}

}  // namespace
}  // namespace multiring
