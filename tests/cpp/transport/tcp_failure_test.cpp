// Peers that end, leave, abort or vanish while others wait for them over TCP.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "support/errors.h"
#include "support/latch.h"
#include "support/network/raw_peer.h"
#include "support/network/tcp_group.h"
#include "support/stopwatch.h"
#include "transport/tcp/connections/frame.h"

namespace multiring {
namespace {

using namespace testing;
using Outcome = WaitResult::Outcome;
using Tickets = std::vector<Network::Ticket>;

TEST(TcpLostPeer, AnEndIsSeenAtOnceByAllThatWait) {
  for (const int connections : {1, 3}) {
    TcpGroup group(4, 1, connections);
    Latch connected(4);
    group.run([&](TcpNetwork& network) {
      connected.count_down();
      connected.wait();
      if (network.rank() == 2) return group.destroy(2);
      const Stopwatch watch;
      const WaitResult result = wait_in_vain(network, 2);
      EXPECT_LT(watch.seconds(), 0.9 * kSlowness);
      EXPECT_EQ(result.outcome, Outcome::kPeerLost);
      EXPECT_EQ(result.peer, 2);
      EXPECT_FALSE(result.peer_left);
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
    const Buffer large(std::size_t{64} << 20);
    const Tickets tickets = {send(network, 0, 0, large)};
    under_way.count_down();
    const WaitResult result = network.wait(tickets, wait_seconds(20));
    EXPECT_EQ(result.outcome, Outcome::kPeerLost);
    EXPECT_EQ(result.peer, 0);
    network.give_up(tickets);
    EXPECT_EQ(wait_in_vain(network, 0).outcome, Outcome::kPeerLost) << "so is what is posted later";
  });
}

TEST(TcpLostPeer, WhatIsWaitedForFromOthersStillArrives) {
  TcpGroup group(3);
  Latch gone(1);
  group.run([&](TcpNetwork& network) {
    const Buffer sent = pattern(500000, 1);
    Buffer got(sent.size());
    if (network.rank() == 0) {
      group.destroy(0);
      return gone.count_down();
    }
    gone.wait();
    const int peer = 3 - network.rank();
    const Tickets tickets = {send(network, peer, 0, sent), receive(network, peer, 0, got)};
    EXPECT_TRUE(network.wait(tickets, wait_seconds(20)).ok());
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
        const Buffer sent = pattern(300000, 5);
        if (network.rank() == 0) {
          const Tickets tickets = {send(network, 1, 0, sent)};
          ASSERT_TRUE(network.wait(tickets, wait_seconds(20)).ok());
          network.leave();
          network.leave();
          left.count_down();
          if (late) group.destroy(0);
          return;
        }
        if (late) left.wait();
        Buffer got(sent.size());
        const Tickets tickets = {receive(network, 0, 0, got)};
        ASSERT_TRUE(network.wait(tickets, wait_seconds(20)).ok());
        EXPECT_TRUE(got == sent);
        const WaitResult result = wait_in_vain(network, 0);
        EXPECT_EQ(result.outcome, Outcome::kPeerLost);
        EXPECT_EQ(result.peer, 0);
        EXPECT_TRUE(result.peer_left);
      });
    }
  }
}

// The connections of a peer end in any order, and its goodbye may come late.
TEST(TcpGoodbye, MayComeLongAfterTheEndOfADataConnection) {
  InprocStore store;
  const TcpOptions options = tcp_options(0, 2);
  TcpNetwork network(store, options);
  RawPeer control(network);
  RawPeer data(network);
  std::thread peer([&] {
    EXPECT_TRUE(control.introduce(options, facts_of_rank_1(options, tcp::ConnectionInfo::kControl)));
    EXPECT_TRUE(data.introduce(options, facts_of_rank_1(options, 0)));
  });
  network.connect(all_links(network), wait_seconds(20));
  peer.join();
  std::thread late([&] {
    data.hang_up();
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // what is tested
    control.say(tcp::encode_goodbye());
  });
  const WaitResult result = wait_in_vain(network, 1);
  late.join();
  EXPECT_EQ(result.outcome, Outcome::kPeerLost);
  EXPECT_TRUE(result.peer_left);
}

// The kernel's buffers are full of what was sent, and of what this rank has not read of what its peer sends.
TEST(TcpGoodbye, MessagesArriveAlthoughTheirReceiverSendsToo) {
  TcpGroup group(2);
  Latch left(1);
  std::atomic<unsigned> done = 0;
  group.run([&](TcpNetwork& network) {
    constexpr std::size_t kBytes = 64 << 10;
    if (network.rank() == 0) {
      const Buffer sent = pattern(kBytes, 1);
      Tickets tickets = {send(network, 1, 0, sent)};
      while (network.wait(tickets, wait_seconds(0.1)).ok()) {
        ++done;
        tickets = {send(network, 1, 0, sent)};
      }
      network.give_up(tickets);
      network.leave();
      left.count_down();
      return group.destroy(0);
    }
    const Buffer other(std::size_t{1} << 20);
    Tickets sending = {send(network, 0, 0, other)};
    left.wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // would be gone by now
    for (unsigned i = 0; i < done; ++i) {
      Buffer got(kBytes);
      const Tickets tickets = {receive(network, 0, 0, got)};
      ASSERT_TRUE(network.wait(tickets, wait_seconds(20)).ok()) << "message " << i << " of " << done;
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
    connected.count_down();
    connected.wait();
    if (network.rank() == 0) {
      network.abort(Error(ErrorKind::kTimeout, "rank 0 waited too long"));
      network.abort(Error(ErrorKind::kMismatch, "late"));
    }
    const WaitResult result = wait_in_vain(network, network.rank() == 0 ? 1 : network.rank() - 1);
    EXPECT_EQ(result.outcome, Outcome::kAborted);
    AbortRecord record;
    ASSERT_TRUE(network.aborted(&record));
    EXPECT_EQ(record.kind, ErrorKind::kTimeout);
    EXPECT_EQ(record.origin, 0);
    EXPECT_EQ(record.message, "rank 0 waited too long");
  });
}

// Large messages fill the data connections; the abort has its own.
TEST(TcpAbort, PassesWhatIsHeldUp) {
  TcpGroup group(2);
  Latch full(2);
  group.run([&](TcpNetwork& network) {
    const Buffer large(std::size_t{32} << 20);
    const Tickets tickets = {send(network, 1 - network.rank(), 0, large)};
    EXPECT_EQ(network.wait(tickets, wait_seconds(0.1)).outcome, Outcome::kTimeout);
    full.count_down();
    full.wait();
    if (network.rank() == 1) network.abort(Error(ErrorKind::kAborted, "enough"));
    EXPECT_EQ(network.wait(tickets, wait_seconds(20)).outcome, Outcome::kAborted);
    network.give_up(tickets);
  });
}

/// Seconds from `end`, which another thread calls when a wait of rank 0 has begun to sleep, to the end of it.
/// The quickest of several: a sleep that nobody ends takes its 50 milliseconds every time.
double quickest_end(Outcome expected,
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
      Buffer got(1);
      const Tickets tickets = {receive(network, 1, 0, got)};
      EXPECT_EQ(network.wait(tickets, waiting).outcome, expected);
      const double seconds = watch->seconds();
      other.join();
      network.give_up(tickets);
      quickest = std::min(quickest, seconds);
    });
  }
  return quickest;
}

TEST(TcpAbort, FromAnotherThreadEndsAWait) {
  EXPECT_LT(quickest_end(Outcome::kAborted,
                         [](TcpNetwork& network, std::atomic<bool>&) {
                           network.abort(Error(ErrorKind::kAborted, "by the watchdog"));
                         }),
            0.025);
}

TEST(TcpWake, EndsAWaitThatIsCancelled) {
  EXPECT_LT(quickest_end(Outcome::kCancelled,
                         [](TcpNetwork& network, std::atomic<bool>& cancelled) {
                           cancelled = true;
                           network.wake();
                         }),
            0.025);
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
    const WaitResult result = wait_in_vain(network, 0);
    EXPECT_EQ(result.outcome, Outcome::kPeerLost);
    EXPECT_EQ(result.peer, 0);
  });
  ::close(to_child[1]);
  ::close(to_child[0]);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
}

}  // namespace
}  // namespace multiring
