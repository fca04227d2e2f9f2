// Messages over TCP between ranks that are threads: sizes, channels, stripes, order.

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/errors.h"
#include "support/network/tcp_group.h"
#include "support/threads.h"

namespace multiring {
namespace {

using namespace testing;

struct Shape {
  int size;
  int channels;
  int connections;
};
void PrintTo(const Shape& shape, std::ostream* out) {
  *out << shape.size << "_ranks_" << shape.channels << "_channels_" << shape.connections << "_connections";
}

class TcpExchange : public ::testing::TestWithParam<Shape> {
 protected:
  TcpGroup group{GetParam().size, GetParam().channels, GetParam().connections};
};

TEST_P(TcpExchange, MessagesOfAllSizesArriveInOrder) {
  group.run([&](TcpNetwork& network) {
    for (int round = 0; round < 3; ++round)
      exchange_messages(network, {0, 1, 3, 4096, 0, 65535, 65536, 65537, 1000003, 5, 300000, 0});
  });
}

TEST_P(TcpExchange, PartsAreOneMessage) { group.run(exchange_parts); }

INSTANTIATE_TEST_SUITE_P(Shapes, TcpExchange,
                         ::testing::Values(Shape{2, 1, 1}, Shape{3, 1, 1}, Shape{4, 1, 1}, Shape{2, 3, 1},
                                           Shape{3, 2, 3}, Shape{4, 2, 2}),
                         kPrinted);

TEST(TcpNetwork, HugeMessagesInBothDirectionsAtOnce) {
  for (const int connections : {1, 3}) {
    TcpGroup group(2, 1, connections);
    group.run([](TcpNetwork& network) {
      // A sanitizer takes half a minute for 64 MiB.
      const std::size_t bytes = ((kSlowness > 1.0 ? std::size_t{8} : std::size_t{64}) << 20) + 13;
      const Payload sent = pattern(bytes, static_cast<unsigned>(network.rank()));
      Payload got(bytes);
      const int peer = 1 - network.rank();
      ASSERT_TRUE(await(network, {send(network, peer, 0, sent), receive(network, peer, 0, got)}, 60).ok());
      ASSERT_TRUE(got == pattern(bytes, static_cast<unsigned>(peer)));
    });
  }
}

// A channel on which nothing is posted holds up itself alone.
TEST(TcpNetwork, ChannelsDoNotWaitForEachOther) {
  TcpGroup group(2, 2, 2);
  group.run([](TcpNetwork& network) {
    const int peer = 1 - network.rank();
    const Payload large = pattern(std::size_t{32} << 20, 1);
    const Payload small = pattern(1000, 2);
    Payload got_large(large.size());
    Payload got_small(small.size());
    const Tickets held_up = {send(network, peer, 0, large)};
    for (int i = 0; i < 10; ++i) {
      ASSERT_TRUE(await(network, {send(network, peer, 1, small), receive(network, peer, 1, got_small)}).ok());
      EXPECT_TRUE(got_small == small);
    }
    EXPECT_FALSE(network.done(held_up[0])) << "32 MiB cannot lie in the kernel's buffers";
    ASSERT_TRUE(await(network, {receive(network, peer, 0, got_large), held_up[0]}).ok());
    EXPECT_TRUE(got_large == large);
  });
}

TEST(TcpNetwork, StripesFollowTheWeights) {
  TcpGroup group(2, 1, 4);
  group.run([](TcpNetwork& network) {
    const int peer = 1 - network.rank();
    ASSERT_EQ(network.stripes(peer, 0), 4u);
    for (const auto& weights :
         {std::vector<std::uint32_t>{1, 1, 1, 1}, {0, 0, 1, 0}, {5, 0, 1, 2}, {1, 2, 3, 1000}}) {
      network.set_weights(peer, 0, weights);  // each rank for what it sends
      exchange_messages(network, {1000000, 100, 70000, 0, 1234567});
    }
    for (const auto& weights : {std::vector<std::uint32_t>{1, 2}, {0, 0, 0, 0}})
      error_of(ErrorKind::kUsage, [&] { network.set_weights(peer, 0, weights); });
  });
}

// Two threads of each rank, a channel each. A thread that does not drive, and would look for its message
// every 50 ms only, would take longer than all turns together may.
TEST(TcpNetwork, ThreadsThatWaitMakeProgressForEachOther) {
  constexpr int kTurns = 2000;
  TcpGroup group(2, 2);
  group.run([](TcpNetwork& network) {
    const int peer = 1 - network.rank();
    const WaitOptions all_turns = wait_seconds(20);
    all_turns.deadline.start();
    in_threads(2, [&](int channel) {
      Payload ball(1 + static_cast<std::size_t>(channel) * 100000);
      for (int turn = 0; turn < kTurns / (1 + channel); ++turn) {
        const bool serves = turn % 2 == network.rank();
        const Tickets ticket = {serves ? send(network, peer, channel, ball)
                                       : receive(network, peer, channel, ball)};
        ASSERT_TRUE(network.wait(ticket, all_turns).ok()) << "turn " << turn;
      }
    });
  });
}

TEST(TcpNetwork, AThreadThatEndsDrivingLetsAnotherOneDrive) {
  TcpGroup group(2, 2);
  group.run([](TcpNetwork& network) {
    const int peer = 1 - network.rank();
    Payload received[2] = {Payload(1), Payload(1)};
    const Payload sent(1);
    Latch ended(1);
    in_threads(3, [&](int thread) {
      if (thread == 2) {  // the message for which thread 0 waits comes when the other waits have ended
        ended.wait();
        ASSERT_TRUE(await(network, {send(network, peer, 0, sent)}).ok());
        return;
      }
      const Tickets ticket = {receive(network, peer, thread, received[thread])};
      if (thread == 0) {
        EXPECT_TRUE(network.wait(ticket, wait_seconds(20)).ok());
        return;
      }
      const std::function<void()> raise = [] { throw std::runtime_error("Ctrl-C"); };
      EXPECT_THROW(network.wait(ticket, wait_seconds(20).with_interrupt(raise)), std::runtime_error);
      const std::atomic<bool> cancelled{true};
      WaitOptions closing = wait_seconds(20);
      closing.cancelled = &cancelled;
      EXPECT_EQ(network.wait(ticket, closing).outcome, Outcome::kCancelled);
      ended.count_down();
    });
  });
}

TEST(TcpNetwork, AnAbortEndsAllThreadsWaits) {
  TcpGroup group(2, 3);
  group.run([](TcpNetwork& network) {
    Latch waiting(3);
    in_threads(4, [&](int thread) {
      if (thread < 3) {
        Payload never(1);
        const Tickets ticket = {receive(network, 1 - network.rank(), thread, never)};
        waiting.count_down();
        EXPECT_EQ(network.wait(ticket, wait_seconds(20)).outcome, Outcome::kAborted);
        return;
      }
      waiting.wait();
      if (network.rank() == 0) network.abort(Error(ErrorKind::kAborted, "as the test has it"));
    });
  });
}

TEST(TcpNetwork, CallbacksOfAWaitMayWait) {
  TcpGroup group(2, 2);
  group.run([](TcpNetwork& network) {
    const int peer = 1 - network.rank();
    const Payload sent(1);
    Payload outer(1);
    Payload inner(1);
    bool called = false;
    const std::function<void()> exchange = [&] {
      if (std::exchange(called, true)) return;
      ASSERT_TRUE(await(network, {send(network, peer, 1, sent), receive(network, peer, 1, inner)}).ok());
      ASSERT_TRUE(await(network, {send(network, peer, 0, sent)}).ok());
    };
    const Tickets tickets = {receive(network, peer, 0, outer)};
    EXPECT_TRUE(network.wait(tickets, wait_seconds(20).with_interrupt(exchange)).ok());
    EXPECT_TRUE(called);
  });
}

TEST(TcpNetwork, OnlyWhatAPlanNeedsIsConnected) {
  TcpGroup group(4, 3);
  Latch looked(4);
  group.run_unconnected([&](TcpNetwork& network) {
    // A ring on channel 1.
    const int next = (network.rank() + 1) % 4;
    const int previous = (network.rank() + 3) % 4;
    const std::vector<Network::Link> ring = {{next, 1}, {previous, 1}};
    network.connect(ring, wait_seconds(20));
    network.connect(ring, wait_seconds(20));  // stands already
    const Payload sent = pattern(100, static_cast<unsigned>(network.rank()));
    Payload got(100);
    ASSERT_TRUE(await(network, {send(network, next, 1, sent), receive(network, previous, 1, got)}).ok());
    EXPECT_TRUE(got == pattern(100, static_cast<unsigned>(previous)));
    for (const auto& [peer, channel] : {std::pair{next, 0}, {(network.rank() + 2) % 4, 1}})
      error_of(
          ErrorKind::kInternal, [&, to = peer, by = channel] { send(network, to, by, sent); },
          "no link to rank");
    // More of it later; a peer that is ahead would make its side of it.
    looked.arrive_and_wait();
    network.connect(all_links(network), wait_seconds(20));
    exchange_messages(network, {10, 100000});
  });
}

TEST(TcpNetwork, LengthsThatDifferAreAMismatchOnBothSides) {
  for (const std::size_t expected : {0, 15, 17, 200000}) {
    TcpGroup group(2);
    group.run([&](TcpNetwork& network) {
      Payload message(network.rank() == 0 ? 16 : expected);
      Tickets tickets;
      if (network.rank() == 0) tickets.push_back(send(network, 1, 0, message));
      Payload more(8);
      tickets.push_back(network.rank() == 0 ? receive(network, 1, 0, more) : receive(network, 0, 0, message));
      ASSERT_EQ(await(network, tickets).outcome, Outcome::kAborted);
      const AbortRecord record = abort_of(network, ErrorKind::kMismatch, 1);
      expect_text(record.message, "rank 0");
      expect_text(record.message, "sent 16 bytes as message 1 on channel 0, where rank 1 expects " +
                                      std::to_string(expected) + " bytes");
    });
  }
}

TEST(TcpNetwork, TicketsAreUsedUpOnce) {
  TcpGroup group(2);
  group.run([](TcpNetwork& network) {
    const Payload sent = pattern(8, 1);
    Payload got(8);
    const int peer = 1 - network.rank();
    const Tickets tickets = {send(network, peer, 0, sent), receive(network, peer, 0, got)};
    ASSERT_TRUE(await(network, tickets).ok());
    error_of(ErrorKind::kInternal, [&] { await(network, tickets); }, "used before");
    EXPECT_FALSE(network.done(tickets[0]));
  });
}

TEST(TcpNetwork, TimeoutLeavesMessagesAsTheyAre) {
  TcpGroup group(2);
  group.run([](TcpNetwork& network) {
    const int peer = 1 - network.rank();
    Payload got(8);
    if (network.rank() == 0) {
      const Tickets tickets = {receive(network, peer, 0, got)};
      EXPECT_EQ(await(network, tickets, 0.05).outcome, Outcome::kTimeout);
      expect_ends_early(network, tickets);
      const Payload go = pattern(1, 0);
      ASSERT_TRUE(await(network, {send(network, peer, 0, go)}).ok());
      ASSERT_TRUE(await(network, tickets).ok());
      EXPECT_TRUE(got == pattern(8, 3));
    } else {
      Payload go(1);
      ASSERT_TRUE(await(network, {receive(network, peer, 0, go)}).ok());
      const Payload sent = pattern(8, 3);
      ASSERT_TRUE(await(network, {send(network, peer, 0, sent)}).ok());
    }
  });
}

TEST(TcpNetwork, GivenUpMessagesGiveTheirMemoryBack) {
  TcpGroup group(2);
  group.run([](TcpNetwork& network) {
    const int peer = 1 - network.rank();
    {
      const Payload large = pattern(std::size_t{32} << 20, 1);
      Payload got(large.size());
      Tickets tickets = {send(network, peer, 0, large)};
      if (network.rank() == 0) tickets.push_back(receive(network, peer, 0, got));
      // Not long enough for all of it.
      network.progress();
      EXPECT_EQ(await(network, tickets, 0).outcome, Outcome::kTimeout);
      network.give_up(tickets);
    }  // a write into freed memory is what the sanitizer finds
    for (int i = 0; i < 20; ++i) network.progress();
    Payload more(1);
    error_of(ErrorKind::kInternal, [&] { receive(network, peer, 0, more); }, "given up");
  });
}

// The peer is there: nobody is to look for the reason on its host.
TEST(TcpNetwork, WhatIsOutOfStepIsNotALostPeer) {
  TcpGroup group(2, 2);
  group.run([](TcpNetwork& network) {
    const int peer = 1 - network.rank();
    Payload first(8);
    Payload second(8);
    const Tickets given_up = {receive(network, peer, 0, first)};
    const Tickets kept = {receive(network, peer, 0, second)};
    network.give_up(given_up);
    error_of(
        ErrorKind::kInternal, [&] { await(network, kept); }, "message 2 on channel 0 between rank",
        "gave up another one");
    error_of(ErrorKind::kInternal, [&] { network.wait_any(kept, wait_seconds(20)); }, "gave up another one");
    network.give_up(kept);
    EXPECT_TRUE(await(network, {send(network, peer, 1, first), receive(network, peer, 1, second)}).ok())
        << "the other channel is in step";
  });
}

TEST(TcpNetwork, InternetProtocolVersion6) {
  TcpGroup group(3, 2, 2);
  for (int rank = 0; rank < 3; ++rank) group.options(rank).interfaces = {"::1"};
  bool there = false;
  for (const tcp::InterfaceAddress& address : tcp::interface_addresses())
    there = there || address.address.host_text() == "::1";
  if (!there) GTEST_SKIP() << "this host has no ::1";
  group.run([](TcpNetwork& network) {
    EXPECT_TRUE(network.addresses().front().address.is_ipv6());
    exchange_messages(network, {0, 1, 100000});
  });
}

/// Of the TCP sockets that this process has open.
std::set<std::string> congestion_controls() {
  std::set<std::string> names;
  for (int descriptor = 0; descriptor < 1024; ++descriptor) {
    char name[17] = {};
    socklen_t length = sizeof name - 1;
    if (::getsockopt(descriptor, IPPROTO_TCP, TCP_CONGESTION, name, &length) == 0) names.insert(name);
  }
  return names;
}

TEST(TcpNetwork, CongestionControlIsTheHostsOrWhatIsAskedForAndBbrOnlyThen) {
  std::string of_host;
  std::ifstream("/proc/sys/net/ipv4/tcp_congestion_control") >> of_host;
  for (const std::string asked : {"", "reno"}) {
    TcpGroup group(2);
    for (int rank = 0; rank < 2; ++rank) group.options(rank).tcp_congestion = asked;
    group.run([&](TcpNetwork&) {
      std::set<std::string> names = congestion_controls();
      if (!asked.empty()) {
        EXPECT_EQ(names, std::set{asked});
      } else if (of_host == "bbr") {
        EXPECT_TRUE(names == std::set<std::string>{"cubic"} || names == std::set<std::string>{"reno"});
      } else {
        EXPECT_EQ(names, std::set{of_host});
      }
    });
  }
}

TEST(TcpNetwork, CongestionControlThatTheKernelDoesNotHave) {
  InprocStore store;
  TcpOptions options = tcp_options(0, 2);
  options.tcp_congestion = "quick";
  expect_usage([&] { TcpNetwork(store, options); }, "MULTIRING_TCP_CONGESTION is 'quick'");
}

TEST(TcpNetwork, AThousandNetworksLeaveNothingOpen) {
  const int before = open_descriptors();
  for (int i = 0; i < 500; ++i) {
    TcpGroup group(2);
    group.run([&](TcpNetwork& network) {
      if (i % 2 == 0) network.leave();
    });
  }
  EXPECT_EQ(open_descriptors(), before);
}

}  // namespace
}  // namespace multiring
