// Peers that end, leave, abort or vanish while others wait for them over TCP.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>
#include <vector>

#include "support/errors.h"
#include "support/network/tcp_group.h"
#include "support/stopwatch.h"

namespace multiring {
namespace {

using namespace testing;

TEST(TcpLostPeer, AnEndIsSeenAtOnceByAllThatWait) {
  for (const int connections : {1, 3}) {
    TcpGroup group(4, 1, connections);
    Latch connected(4);
    group.run([&](TcpNetwork& network) {
      connected.arrive_and_wait();
      if (network.rank() == 2) return group.destroy(2);
      const Stopwatch watch;
      expect_lost(wait_until_it_fails(network, 2), 2, false);
      EXPECT_LT(watch.seconds(), 0.9 * kSlowness);
    });
  }
}

TEST(TcpLostPeer, ASendIsLostWithItsReceiver) {
  TcpGroup group(2);
  Latch under_way(1);
  group.run([&](TcpNetwork& network) {
    if (network.rank() == 0) {
      under_way.wait();
      return group.destroy(0);
    }
    const Payload large(std::size_t{64} << 20);
    const Tickets tickets = {send(network, 0, 0, large)};
    under_way.count_down();
    expect_lost(await(network, tickets), 0);
    network.give_up(tickets);
    EXPECT_EQ(wait_until_it_fails(network, 0).outcome, Outcome::kPeerLost) << "so is what is posted later";
  });
}

TEST(TcpLostPeer, WhatIsWaitedForFromOthersStillArrives) {
  TcpGroup group(3);
  Latch gone(1);
  group.run([&](TcpNetwork& network) {
    const Payload sent = pattern(500000, 1);
    Payload got(sent.size());
    if (network.rank() == 0) {
      group.destroy(0);
      return gone.count_down();
    }
    gone.wait();
    const int peer = 3 - network.rank();
    EXPECT_TRUE(await(network, {send(network, peer, 0, sent), receive(network, peer, 0, got)}).ok());
    EXPECT_TRUE(got == sent);
  });
}

// What was sent before the goodbye is not lost by it, whenever it is received.
TEST(TcpGoodbye, MessagesBeforeItArrive) {
  for (const int connections : {1, 4}) {
    for (const bool late : {false, true}) {
      TcpGroup group(2, 1, connections);
      Latch left(1);
      group.run([&](TcpNetwork& network) {
        const Payload sent = pattern(300000, 5);
        if (network.rank() == 0) {
          ASSERT_TRUE(await(network, {send(network, 1, 0, sent)}).ok());
          network.leave();
          network.leave();
          left.count_down();
          if (late) group.destroy(0);
          return;
        }
        if (late) left.wait();
        Payload got(sent.size());
        ASSERT_TRUE(await(network, {receive(network, 0, 0, got)}).ok());
        EXPECT_TRUE(got == sent);
        expect_lost(wait_until_it_fails(network, 0), 0, true);
      });
    }
  }
}

// The kernel's buffers are full of what was sent, and of what this rank has not read of what its peer sends.
TEST(TcpGoodbye, MessagesArriveAlthoughTheirReceiverSendsToo) {
  TcpGroup group(2);
  Latch left(1);
  std::atomic<unsigned> done = 0;
  group.run([&](TcpNetwork& network) {
    constexpr std::size_t kBytes = 64 << 10;
    if (network.rank() == 0) {
      const Payload sent = pattern(kBytes, 1);
      Tickets tickets = {send(network, 1, 0, sent)};
      while (await(network, tickets, 0.1).ok()) {
        ++done;
        tickets = {send(network, 1, 0, sent)};
      }
      network.give_up(tickets);
      network.leave();
      left.count_down();
      return group.destroy(0);
    }
    const Payload other(std::size_t{1} << 20);
    Tickets sending = {send(network, 0, 0, other)};
    left.wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // would be gone by now
    for (unsigned i = 0; i < done; ++i) {
      Payload got(kBytes);
      ASSERT_TRUE(await(network, {receive(network, 0, 0, got)}).ok()) << "message " << i << " of " << done;
      EXPECT_TRUE(got == pattern(kBytes, 1));
    }
    network.give_up(sending);
  });
}

TEST(TcpGoodbye, OfBothAtOnce) {
  TcpGroup group(3, 2, 2);
  group.run([](TcpNetwork& network) {
    network.leave();
    error_of(ErrorKind::kInternal, [&] { send(network, (network.rank() + 1) % 3, 0, {}); });
  });
}

TEST(TcpAbort, ReachesAllThatWaitAlsoThroughOthers) {
  TcpGroup group(4);
  Latch connected(4);
  group.run_unconnected([&](TcpNetwork& network) {
    // A chain 0 - 1 - 2 - 3; everybody waits for the one before.
    std::vector<Network::Link> links;
    if (network.rank() > 0) links.push_back({network.rank() - 1, 0});
    if (network.rank() < 3) links.push_back({network.rank() + 1, 0});
    network.connect(links, wait_seconds(20));
    connected.arrive_and_wait();
    if (network.rank() == 0) {
      network.abort(Error(ErrorKind::kTimeout, "rank 0 waited too long"));
      network.abort(Error(ErrorKind::kMismatch, "late"));
    }
    const WaitResult result = wait_until_it_fails(network, network.rank() == 0 ? 1 : network.rank() - 1);
    EXPECT_EQ(result.outcome, Outcome::kAborted);
    EXPECT_EQ(abort_of(network, ErrorKind::kTimeout, 0).message, "rank 0 waited too long");
  });
}

// Large messages fill the data connections; the abort has its own.
TEST(TcpAbort, PassesWhatIsHeldUp) {
  TcpGroup group(2);
  Latch full(2);
  group.run([&](TcpNetwork& network) {
    const Payload large(std::size_t{32} << 20);
    const Tickets tickets = {send(network, 1 - network.rank(), 0, large)};
    EXPECT_EQ(await(network, tickets, 0.1).outcome, Outcome::kTimeout);
    full.arrive_and_wait();
    if (network.rank() == 1) network.abort(Error(ErrorKind::kAborted, "enough"));
    EXPECT_EQ(await(network, tickets).outcome, Outcome::kAborted);
    network.give_up(tickets);
  });
}

/// Expects that `end`, which another thread calls when a wait of rank 0 has begun to sleep, ends it soon. The
/// quickest of several counts: a sleep that nobody ends takes its 50 milliseconds every time.
void expect_ended_soon(Outcome expected,
                       const std::function<void(TcpNetwork&, std::atomic<bool>& cancelled)>& end) {
  double quickest = 1000;
  for (int i = 0; i < 10; ++i) {
    TcpGroup group(2);
    group.run([&](TcpNetwork& network) {
      if (network.rank() != 0) return;
      Latch sleeps(1);
      std::atomic<bool> cancelled = false;
      std::optional<Stopwatch> watch;
      std::thread other([&] {
        sleeps.wait();
        watch.emplace();
        end(network, cancelled);
      });
      const std::function<void()> before_a_sleep = [&] { sleeps.count_down(); };
      WaitOptions waiting = wait_seconds(20);
      waiting.interrupt = &before_a_sleep;
      waiting.cancelled = &cancelled;
      Payload got(1);
      const Tickets tickets = {receive(network, 1, 0, got)};
      EXPECT_EQ(network.wait(tickets, waiting).outcome, expected);
      const double seconds = watch->seconds();
      other.join();
      network.give_up(tickets);
      quickest = std::min(quickest, seconds);
    });
  }
  EXPECT_LT(quickest, 0.025);
}

TEST(TcpAbort, FromAnotherThreadEndsAWait) {
  expect_ended_soon(Outcome::kAborted, [](TcpNetwork& network, std::atomic<bool>&) {
    network.abort(Error(ErrorKind::kAborted, "by the watchdog"));
  });
}

TEST(TcpWake, EndsAWaitThatIsCancelled) {
  expect_ended_soon(Outcome::kCancelled, [](TcpNetwork& network, std::atomic<bool>& cancelled) {
    cancelled = true;
    network.wake();
  });
}

// A fork holds the connections open as well, until it lets go of them: then the rank's end is seen.
TEST(TcpFork, AbandonedConnectionsEndWithTheirRank) {
  TcpGroup group(2);
  int to_child[2];
  ASSERT_EQ(::pipe(to_child), 0);
  pid_t child = -1;
  group.run([&](TcpNetwork& network) {
    if (network.rank() == 0) {
      child = ::fork();
      if (child == 0) {
        network.abandon();
        char end = 0;
        ::close(to_child[1]);
        [[maybe_unused]] const ssize_t got = ::read(to_child[0], &end, 1);  // lives on until the test is over
        ::_exit(0);
      }
      return group.destroy(0);
    }
    expect_lost(wait_until_it_fails(network, 0), 0);
  });
  ::close(to_child[1]);
  ::close(to_child[0]);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
}

}  // namespace
}  // namespace multiring
