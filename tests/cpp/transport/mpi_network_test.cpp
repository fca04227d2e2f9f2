// Messages over MPI's point-to-point operations, between ranks that are threads
// (support/network/inproc_mpi.h). The same over real MPI libraries: tests/python/test_mpi.py.

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "support/errors.h"
#include "support/latch.h"
#include "support/network/inproc_mpi.h"
#include "support/network/tcp_group.h"

namespace multiring {
namespace {

using namespace testing;
using Outcome = WaitResult::Outcome;
using Tickets = std::vector<Network::Ticket>;

constexpr int kChannels = 2;
// Copied at once by the stand-in for MPI, and not before its receive is there.
constexpr std::size_t kShort = 100;
constexpr std::size_t kLong = 300007;

/// Runs `body` with a network in a thread for each rank. Networks stay until all are done, unless a body
/// takes its own away.
void run_ranks(int size, const std::function<void(std::unique_ptr<MpiNetwork>&)>& body) {
  InprocMpi mpi(size);
  std::vector<std::unique_ptr<MpiNetwork>> networks(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  Latch made(size);
  Latch connected(size);
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto& network = networks[static_cast<std::size_t>(rank)];
      network =
          std::make_unique<MpiNetwork>(mpi.session(rank), mpi_options(rank, size, kChannels, "network"));
      made.count_down();
      made.wait();
      network->connect(all_links(*network), wait_seconds(20));
      connected.count_down();
      connected.wait();
      body(network);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(MpiNetwork, MessagesOfAllSizesArriveInOrder) {
  for (const int size : {1, 2, 3, 4}) {
    run_ranks(size, [](std::unique_ptr<MpiNetwork>& network) {
      exchange_messages(*network, {0, 1, 3, 4096, 0, 4097, 1000003, 5, 300000, 0});
    });
  }
}

TEST(MpiNetwork, PartsAreOneMessage) {
  run_ranks(2, [](std::unique_ptr<MpiNetwork>& network) {
    const int other = 1 - network->rank();
    const Buffer whole = pattern(kLong, static_cast<unsigned>(network->rank()));
    std::vector<std::span<const std::byte>> parts = {std::span(whole).first(1), {}};
    parts.push_back(std::span(whole).subspan(1, 1000));
    parts.push_back(std::span(whole).subspan(1001));
    Buffer got(whole.size());
    const Tickets tickets = {network->post_send(other, 1, parts), receive(*network, other, 1, got)};
    ASSERT_TRUE(network->wait(tickets, wait_seconds(20)).ok());
    EXPECT_TRUE(got == pattern(kLong, static_cast<unsigned>(other)));
  });
}

TEST(MpiNetwork, LengthsThatDifferAreAMismatchOnAll) {
  for (const bool longer : {false, true}) {
    for (const std::size_t bytes : {kShort, kLong}) {
      run_ranks(3, [&](std::unique_ptr<MpiNetwork>& network) {
        Buffer message(bytes);
        Buffer other(longer ? bytes / 2 : bytes * 2);
        if (network->rank() == 0) send(*network, 1, 0, message);
        if (network->rank() == 1) receive(*network, 0, 0, other);
        EXPECT_EQ(wait_in_vain(*network, 2 - network->rank() / 2).outcome, Outcome::kAborted);
        AbortRecord record;
        ASSERT_TRUE(network->aborted(&record));
        EXPECT_EQ(record.kind, ErrorKind::kMismatch);
        EXPECT_EQ(record.origin, 1);
        EXPECT_NE(record.message.find("rank 0 on host sent"), std::string::npos) << record.message;
        EXPECT_NE(record.message.find("rank 1 expects " + std::to_string(other.size()) + " bytes"),
                  std::string::npos)
            << record.message;
      });
    }
  }
}

TEST(MpiNetwork, ThoseWhoLeaveAreLostButWhatTheySentArrives) {
  run_ranks(2, [](std::unique_ptr<MpiNetwork>& network) {
    Buffer message = pattern(kShort, 5);
    if (network->rank() == 0) {
      const Tickets tickets = {send(*network, 1, 0, message)};
      ASSERT_TRUE(network->wait(tickets, wait_seconds(20)).ok());
      network.reset();
      return;
    }
    Buffer got(kShort);
    const Tickets first = {receive(*network, 0, 0, got)};
    ASSERT_TRUE(network->wait(first, wait_seconds(20)).ok());
    EXPECT_TRUE(got == message);
    Buffer none(1);
    const Tickets second = {receive(*network, 0, 1, none)};
    const WaitResult result = network->wait(second, wait_seconds(20));
    EXPECT_EQ(result.outcome, Outcome::kPeerLost);
    EXPECT_EQ(result.peer, 0);
    EXPECT_TRUE(result.peer_left);
    Buffer unwanted(kLong);
    const Tickets third = {send(*network, 0, 0, unwanted)};
    EXPECT_EQ(network->wait(third, wait_seconds(20)).outcome, Outcome::kPeerLost);
    const Error error =
        error_of(ErrorKind::kPeerLost, [&] { network->connect(all_links(*network), wait_seconds(5)); });
    expect_text(error, "rank 0 on host has left the job");
  });
}

// Its receives are cancelled: nothing that is sent for them arrives.
TEST(MpiNetwork, ThoseWhoLeaveTakeTheirReceivesWithThem) {
  run_ranks(2, [](std::unique_ptr<MpiNetwork>& network) {
    auto memory = std::make_shared<Buffer>(kLong);
    network->keep(memory);
    if (network->rank() == 0) {
      receive(*network, 1, 0, *memory);
      network->leave();
      return;
    }
    Buffer none(1);
    const Tickets goodbye = {receive(*network, 0, 1, none)};
    ASSERT_EQ(network->wait(goodbye, wait_seconds(20)).outcome, Outcome::kPeerLost);
    const Tickets unwanted = {send(*network, 0, 0, *memory)};
    EXPECT_EQ(network->wait(unwanted, wait_seconds(20)).outcome, Outcome::kPeerLost);
  });
}

TEST(MpiNetwork, AnAbortReachesAll) {
  run_ranks(4, [](std::unique_ptr<MpiNetwork>& network) {
    if (network->rank() == 2) network->abort(Error(ErrorKind::kInternal, std::string(5000, 'x')));
    EXPECT_EQ(wait_in_vain(*network, (network->rank() + 1) % 4).outcome, Outcome::kAborted);
    AbortRecord record;
    ASSERT_TRUE(network->aborted(&record));
    EXPECT_EQ(record.kind, ErrorKind::kInternal);
    EXPECT_EQ(record.origin, 2);
  });
}

TEST(MpiNetwork, WhatIsGivenUpPutsItsLinkOutOfStep) {
  run_ranks(2, [](std::unique_ptr<MpiNetwork>& network) {
    if (network->rank() == 1) return;
    auto lost = std::make_shared<Buffer>(kLong);
    network->keep(lost);
    const Tickets tickets = {send(*network, 1, 0, *lost), receive(*network, 1, 0, *lost)};
    EXPECT_EQ(network->wait(tickets, wait_seconds(0.01)).outcome, Outcome::kTimeout);
    Buffer later(1);
    const Tickets pending = {receive(*network, 1, 0, later)};
    network->give_up(tickets);
    error_of(ErrorKind::kInternal, [&] { network->wait(pending, wait_seconds(5)); });
    error_of(ErrorKind::kInternal, [&] { receive(*network, 1, 0, later); });
    const Tickets other = {receive(*network, 1, 1, later)};
    EXPECT_EQ(network->wait(other, wait_seconds(0.01)).outcome, Outcome::kTimeout);
  });
}

TEST(MpiNetwork, WaitsCanBeInterruptedAndCancelled) {
  run_ranks(2, [](std::unique_ptr<MpiNetwork>& network) {
    Buffer message(1);
    const Tickets tickets = {receive(*network, 1 - network->rank(), 0, message)};
    struct Stop {};
    const std::function<void()> interrupt = [] { throw Stop{}; };
    WaitOptions waiting = wait_seconds(20);
    waiting.interrupt = &interrupt;
    EXPECT_THROW(network->wait(tickets, waiting), Stop);
    const std::atomic<bool> cancelled{true};
    waiting.interrupt = nullptr;
    waiting.cancelled = &cancelled;
    EXPECT_EQ(network->wait(tickets, waiting).outcome, Outcome::kCancelled);
  });
}

TEST(MpiSession, NamesThatFallOnTheSameTagsAreRefused) {
  InprocMpi mpi(1);
  const auto session = mpi.session(0);
  const int first = session->claim_tags("a", 4);
  EXPECT_NE(session->claim_tags("b", 4), first);
  EXPECT_EQ(first % 4, 0);
  EXPECT_GE(first, 4);
  error_of(ErrorKind::kInternal, [&] { session->claim_tags("a", 4); });
}

TEST(MpiSession, WhatOneRankHasAllGet) {
  constexpr int kSize = 4;
  InprocMpi mpi(kSize);
  std::vector<std::string> got(kSize);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank)
    threads.emplace_back([&, rank] {
      got[static_cast<std::size_t>(rank)] =
          mpi.session(rank)->broadcast(rank == 2 ? "tcp://host:1234" : "", 2, wait_seconds(20));
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& value : got) EXPECT_EQ(value, "tcp://host:1234");
}

// What comes after all must not be written to memory that is gone.
TEST(MpiSession, ABroadcastThatNobodyMakesTimesOutAndMayComeLater) {
  InprocMpi mpi(2);
  const auto late = mpi.session(1);
  const Error error = error_of(ErrorKind::kTimeout, [&] { late->broadcast("", 0, wait_seconds(0.05)); });
  expect_text(error, "rank 1 of 2 waited in init");
  EXPECT_EQ(mpi.session(0)->broadcast(std::string(4000, 'x'), 0, wait_seconds(20)), std::string(4000, 'x'));
}

}  // namespace
}  // namespace multiring
