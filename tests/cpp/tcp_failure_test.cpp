// Peers that end, leave, abort or vanish while others wait for them over TCP.

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "support/errors.h"
#include "support/latch.h"
#include "support/raw_peer.h"
#include "support/tcp_group.h"
#include "transport/tcp/frame.h"

namespace multiring {
namespace {

using testing::all_links;
using testing::Buffer;
using testing::error_of;
using testing::expect_text;
using testing::kSlowness;
using testing::Latch;
using testing::pattern;
using testing::receive;
using testing::send;
using testing::TcpGroup;
using testing::wait_seconds;
using Outcome = WaitResult::Outcome;
using Tickets = std::vector<Network::Ticket>;

/// Waits for a message that never comes.
WaitResult wait_in_vain(TcpNetwork& network, int peer, double seconds = 20) {
  Buffer got(100);
  const Tickets tickets = {receive(network, peer, 0, got)};
  const WaitResult result = network.wait(tickets, wait_seconds(seconds));
  network.give_up(tickets);
  return result;
}

TEST(TcpLostPeer, AnEndIsSeenAtOnceByAllThatWait) {
  for (const int connections : {1, 3}) {
    TcpGroup group(4, 1, connections);
    group.run([&](TcpNetwork& network) {
      if (network.rank() == 2) return group.destroy(2);
      const auto start = Clock::now();
      const WaitResult result = wait_in_vain(network, 2);
      EXPECT_LT(seconds_between(start, Clock::now()), 0.9 * kSlowness);
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
  const TcpOptions options = testing::tcp_options(0, 2);
  TcpNetwork network(store, options);
  testing::RawPeer control(network);
  testing::RawPeer data(network);
  std::thread peer([&] {
    EXPECT_TRUE(control.introduce(options, testing::facts_of_rank_1(options, tcp::HelloFacts::kControl)));
    EXPECT_TRUE(data.introduce(options, testing::facts_of_rank_1(options, 0)));
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
      network.abort(ErrorKind::kTimeout, "rank 0 waited too long");
      network.abort(ErrorKind::kMismatch, "late");
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
    if (network.rank() == 1) network.abort(ErrorKind::kAborted, "enough");
    EXPECT_EQ(network.wait(tickets, wait_seconds(20)).outcome, Outcome::kAborted);
    network.give_up(tickets);
  });
}

TEST(TcpAbort, FromAnotherThreadEndsAWait) {
  TcpGroup group(2);
  group.run([](TcpNetwork& network) {
    std::thread other;
    if (network.rank() == 0)
      other = std::thread([&] { network.abort(ErrorKind::kAborted, "by the watchdog"); });
    EXPECT_EQ(wait_in_vain(network, 1 - network.rank()).outcome, Outcome::kAborted);
    if (other.joinable()) other.join();
  });
}

TEST(TcpWake, EndsAWaitThatIsCancelled) {
  TcpGroup group(2);
  group.run([](TcpNetwork& network) {
    std::atomic<bool> cancelled = false;
    std::thread other([&] {
      cancelled = true;
      network.wake();
    });
    Buffer got(1);
    const Tickets tickets = {receive(network, 1 - network.rank(), 0, got)};
    Waiting waiting = wait_seconds(20);
    waiting.cancelled = &cancelled;
    EXPECT_EQ(network.wait(tickets, waiting).outcome, Outcome::kCancelled);
    other.join();
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
    const WaitResult result = wait_in_vain(network, 0);
    EXPECT_EQ(result.outcome, Outcome::kPeerLost);
    EXPECT_EQ(result.peer, 0);
  });
  ::close(to_child[1]);
  ::close(to_child[0]);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
}

bool set_loopback(bool up) {
  const int socket = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  bool done = ::ioctl(socket, SIOCGIFFLAGS, &request) == 0;
  if (up)
    request.ifr_flags |= IFF_UP;
  else
    request.ifr_flags &= ~IFF_UP;
  done = done && ::ioctl(socket, SIOCSIFFLAGS, &request) == 0;
  ::close(socket);
  return done;
}

/// Runs `body` in a network of its own, which can be switched off; false if this process may not have one.
bool in_own_network(const std::function<void()>& body) {
  bool made = false;
  std::thread thread([&] {
    // Of this thread and of those that it starts.
    made = ::unshare(CLONE_NEWNET) == 0 && set_loopback(true);
    if (made) body();
  });
  thread.join();
  return made;
}

TEST(TcpHeartbeat, FindsAHostThatVanished) {
  const bool made = in_own_network([] {
    TcpGroup group(2);
    for (int rank = 0; rank < 2; ++rank) group.options(rank).heartbeat = 2.0;
    Latch both(2);
    std::atomic<bool> off = false;
    group.run([&](TcpNetwork& network) {
      const auto start = Clock::now();
      both.count_down();
      both.wait();
      if (!off.exchange(true)) {
        ASSERT_TRUE(set_loopback(false));
      }
      const WaitResult result = wait_in_vain(network, 1 - network.rank(), 30);
      EXPECT_EQ(result.outcome, Outcome::kPeerLost);
      EXPECT_EQ(result.peer, 1 - network.rank());
      EXPECT_FALSE(result.peer_left);
      EXPECT_GT(seconds_between(start, Clock::now()), 0.9);
      EXPECT_LT(seconds_between(start, Clock::now()), 4.0 * kSlowness);
    });
  });
  if (!made) GTEST_SKIP() << "a network namespace of its own cannot be made (needs CAP_SYS_ADMIN)";
}

TEST(TcpHeartbeat, FindsOneThatVanishedInTheMiddleOfAMessage) {
  const bool made = in_own_network([] {
    TcpGroup group(2, 1, 2);
    for (int rank = 0; rank < 2; ++rank) group.options(rank).heartbeat = 2.0;
    Latch off(1);
    group.run([&](TcpNetwork& network) {
      Buffer large(std::size_t{64} << 20);
      Tickets tickets;
      if (network.rank() == 1) {
        tickets = {send(network, 0, 0, large)};
        EXPECT_EQ(network.wait(tickets, wait_seconds(0.2)).outcome, Outcome::kTimeout);
        ASSERT_TRUE(set_loopback(false));
        off.count_down();
      } else {
        off.wait();
        tickets = {receive(network, 1, 0, large)};
      }
      const WaitResult result = network.wait(tickets, wait_seconds(30));
      EXPECT_EQ(result.outcome, Outcome::kPeerLost);
      EXPECT_EQ(result.peer, 1 - network.rank());
      network.give_up(tickets);
    });
  });
  if (!made) GTEST_SKIP() << "a network namespace of its own cannot be made (needs CAP_SYS_ADMIN)";
}

/// From now on nothing arrives on the data connections of this process, not even acknowledgements; the
/// control connections, which have a limit of their own, stay as they are. How many were cut off.
int cut_data_connections() {
  int cut = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    tcp_info info{};
    unsigned limit = 0;
    socklen_t info_length = sizeof info;
    socklen_t limit_length = sizeof limit;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &info_length) != 0 ||
        info.tcpi_state != TCP_ESTABLISHED)
      continue;
    if (::getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit, &limit_length) != 0 || limit != 0) continue;
    sock_filter nothing = BPF_STMT(BPF_RET | BPF_K, 0);
    const sock_fprog program = {1, &nothing};
    if (::setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0) ++cut;
  }
  return cut;
}

// With room in the peer's buffers and without.
TEST(TcpHeartbeat, ABrokenPathIsFoundWhereBothEndsSend) {
  for (const std::size_t bytes : {1000, 64 << 20}) {
    TcpGroup group(2);
    for (int rank = 0; rank < 2; ++rank) group.options(rank).heartbeat = 1.0;
    Latch full(2);
    Latch cut(1);
    group.run([&](TcpNetwork& network) {
      const int peer = 1 - network.rank();
      const Buffer large(bytes);
      Buffer got(bytes);
      Tickets tickets;
      if (bytes > 1000) tickets.push_back(send(network, peer, 0, large));
      for (int i = 0; i < 100; ++i) network.progress();
      full.count_down();
      full.wait();
      if (network.rank() == 0) {
        EXPECT_EQ(cut_data_connections(), 2);
        cut.count_down();
      }
      cut.wait();
      if (bytes == 1000) tickets.push_back(send(network, peer, 0, large));
      tickets.push_back(receive(network, peer, 0, got));
      const auto start = Clock::now();
      const WaitResult result = network.wait(tickets, wait_seconds(20));
      EXPECT_EQ(result.outcome, Outcome::kPeerLost);
      EXPECT_EQ(result.peer, peer);
      EXPECT_FALSE(result.peer_left);
      EXPECT_GT(seconds_between(start, Clock::now()), 0.5);
      network.give_up(tickets);
    });
  }
}

// The kernel answers for a rank that computes for longer than the heartbeat, also when its buffers are full.
TEST(TcpHeartbeat, ARankThatMakesNoProgressIsNotLost) {
  TcpGroup group(2);
  for (int rank = 0; rank < 2; ++rank) group.options(rank).heartbeat = 1.0;
  group.run([](TcpNetwork& network) {
    const Buffer large = pattern(std::size_t{32} << 20, 3);
    if (network.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::seconds(3));  // what is tested
      Buffer got(large.size());
      const Tickets tickets = {receive(network, 1, 0, got)};
      ASSERT_TRUE(network.wait(tickets, wait_seconds(20)).ok());
      EXPECT_TRUE(got == large);
    } else {
      const Tickets tickets = {send(network, 0, 0, large)};
      EXPECT_TRUE(network.wait(tickets, wait_seconds(20)).ok());
    }
  });
}

}  // namespace
}  // namespace multiring
