// Messages over MPI's point-to-point operations, between ranks that are threads
// (support/network/inproc_mpi.h). The same over real MPI libraries: tests/python/test_mpi.py.

#include <functional>
#include <memory>
#include <vector>

#include "support/errors.h"
#include "support/network/inproc_mpi.h"
#include "support/network/tcp_group.h"

namespace multiring {
namespace {

using namespace testing;

constexpr int kChannels = 2;
// Copied at once by the stand-in for MPI, and not before its receive is there.
constexpr std::size_t kShort = 100;
constexpr std::size_t kLong = 300007;

/// Runs `body` with a network in a thread for each rank. Networks stay until all are done, unless a body
/// takes its own away.
void run_ranks(int size, const std::function<void(std::unique_ptr<MpiNetwork>&)>& body) {
  InprocMpi mpi(size);
  std::vector<std::unique_ptr<MpiNetwork>> networks(static_cast<std::size_t>(size));
  Latch made(size);
  Latch connected(size);
  in_threads(size, [&](int rank) {
    auto& network = networks[static_cast<std::size_t>(rank)];
    network = std::make_unique<MpiNetwork>(mpi.session(rank), mpi_options(rank, size, kChannels, "network"));
    made.arrive_and_wait();
    network->connect(all_links(*network), wait_seconds(20));
    connected.arrive_and_wait();
    body(network);
  });
}

TEST(MpiNetwork, MessagesOfAllSizesArriveInOrder) {
  for (const int size : {1, 2, 3, 4}) {
    run_ranks(size, [](std::unique_ptr<MpiNetwork>& network) {
      exchange_messages(*network, {0, 1, 3, 4096, 0, 4097, 1000003, 5, 300000, 0});
    });
  }
}

TEST(MpiNetwork, PartsAreOneMessage) {
  run_ranks(2, [](std::unique_ptr<MpiNetwork>& network) { exchange_parts(*network); });
}

TEST(MpiNetwork, LengthsThatDifferAreAMismatchOnAll) {
  for (const bool longer : {false, true}) {
    for (const std::size_t bytes : {kShort, kLong}) {
      run_ranks(3, [&](std::unique_ptr<MpiNetwork>& network) {
        Payload message(bytes);
        Payload other(longer ? bytes / 2 : bytes * 2);
        if (network->rank() == 0) send(*network, 1, 0, message);
        if (network->rank() == 1) receive(*network, 0, 0, other);
        EXPECT_EQ(wait_until_it_fails(*network, 2 - network->rank() / 2).outcome, Outcome::kAborted);
        const AbortRecord record = abort_of(*network, ErrorKind::kMismatch, 1);
        expect_text(record.message, "rank 0 on host sent");
        expect_text(record.message, "rank 1 expects " + std::to_string(other.size()) + " bytes");
      });
    }
  }
}

TEST(MpiNetwork, ThoseWhoLeaveAreLostButWhatTheySentArrives) {
  run_ranks(2, [](std::unique_ptr<MpiNetwork>& network) {
    Payload message = pattern(kShort, 5);
    if (network->rank() == 0) {
      ASSERT_TRUE(await(*network, {send(*network, 1, 0, message)}).ok());
      network.reset();
      return;
    }
    Payload got(kShort);
    ASSERT_TRUE(await(*network, {receive(*network, 0, 0, got)}).ok());
    EXPECT_TRUE(got == message);
    Payload none(1);
    expect_lost(await(*network, {receive(*network, 0, 1, none)}), 0, true);
    Payload unwanted(kLong);
    expect_lost(await(*network, {send(*network, 0, 0, unwanted)}), 0);
    error_of(
        ErrorKind::kPeerLost, [&] { network->connect(all_links(*network), wait_seconds(5)); },
        "rank 0 on host has left the job");
  });
}

// Its receives are cancelled: nothing that is sent for them arrives.
TEST(MpiNetwork, ThoseWhoLeaveTakeTheirReceivesWithThem) {
  run_ranks(2, [](std::unique_ptr<MpiNetwork>& network) {
    auto memory = std::make_shared<Payload>(kLong);
    network->keep(memory);
    if (network->rank() == 0) {
      receive(*network, 1, 0, *memory);
      network->leave();
      return;
    }
    Payload none(1);
    ASSERT_EQ(await(*network, {receive(*network, 0, 1, none)}).outcome, Outcome::kPeerLost);
    EXPECT_EQ(await(*network, {send(*network, 0, 0, *memory)}).outcome, Outcome::kPeerLost);
  });
}

TEST(MpiNetwork, AnAbortReachesAll) {
  run_ranks(4, [](std::unique_ptr<MpiNetwork>& network) {
    if (network->rank() == 2) network->abort(Error(ErrorKind::kInternal, std::string(5000, 'x')));
    EXPECT_EQ(wait_until_it_fails(*network, (network->rank() + 1) % 4).outcome, Outcome::kAborted);
    abort_of(*network, ErrorKind::kInternal, 2);
  });
}

TEST(MpiNetwork, WhatIsGivenUpPutsItsLinkOutOfStep) {
  run_ranks(2, [](std::unique_ptr<MpiNetwork>& network) {
    if (network->rank() == 1) return;
    auto lost = std::make_shared<Payload>(kLong);
    network->keep(lost);
    const Tickets tickets = {send(*network, 1, 0, *lost), receive(*network, 1, 0, *lost)};
    EXPECT_EQ(await(*network, tickets, 0.01).outcome, Outcome::kTimeout);
    Payload later(1);
    const Tickets pending = {receive(*network, 1, 0, later)};
    network->give_up(tickets);
    error_of(ErrorKind::kInternal, [&] { await(*network, pending, 5); });
    error_of(ErrorKind::kInternal, [&] { receive(*network, 1, 0, later); });
    EXPECT_EQ(await(*network, {receive(*network, 1, 1, later)}, 0.01).outcome, Outcome::kTimeout);
  });
}

TEST(MpiNetwork, WaitsCanBeInterruptedAndCancelled) {
  run_ranks(2, [](std::unique_ptr<MpiNetwork>& network) {
    Payload message(1);
    expect_ends_early(*network, {receive(*network, 1 - network->rank(), 0, message)});
  });
}

TEST(MpiSession, NamesThatFallOnTheSameTagsAreRefused) {
  InprocMpi mpi(1);
  const auto session = mpi.session(0);
  const int first = session->reserve_tags("a", 4);
  EXPECT_NE(session->reserve_tags("b", 4), first);
  EXPECT_EQ(first % 4, 0);
  EXPECT_GE(first, 4);
  error_of(ErrorKind::kInternal, [&] { session->reserve_tags("a", 4); });
}

TEST(MpiSession, WhatOneRankHasAllGet) {
  constexpr int kSize = 4;
  InprocMpi mpi(kSize);
  in_threads(kSize, [&](int rank) {
    EXPECT_EQ(mpi.session(rank)->broadcast(rank == 2 ? "tcp://host:1234" : "", 2, wait_seconds(20)),
              "tcp://host:1234");
  });
}

// What comes after all must not be written to memory that is gone.
TEST(MpiSession, ABroadcastThatNobodyMakesTimesOutAndMayComeLater) {
  InprocMpi mpi(2);
  const auto late = mpi.session(1);
  error_of(
      ErrorKind::kTimeout, [&] { late->broadcast("", 0, wait_seconds(0.05)); }, "rank 1 of 2 waited in init");
  EXPECT_EQ(mpi.session(0)->broadcast(std::string(4000, 'x'), 0, wait_seconds(20)), std::string(4000, 'x'));
}

}  // namespace
}  // namespace multiring
