// Messages over TCP between ranks that are threads: sizes, channels, stripes, order.

#include <dirent.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/errors.h"
#include "support/latch.h"
#include "support/network/tcp_group.h"

namespace multiring {
namespace {

using namespace testing;
using Outcome = WaitResult::Outcome;
using Tickets = std::vector<Network::Ticket>;

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

TEST_P(TcpExchange, PartsAreOneMessage) {
  group.run([&](TcpNetwork& network) {
    const Buffer whole = pattern(300007, static_cast<unsigned>(network.rank()));
    std::vector<std::span<const std::byte>> parts;
    for (std::size_t at = 0, step = 0; at < whole.size(); at += step) {
      step = std::min(whole.size() - at, 1 + at / 50);  // of growing size: more than one call can take
      parts.push_back(std::span(whole).subspan(at, step));
      parts.push_back({});
    }
    const int next = (network.rank() + 1) % network.size();
    const int previous = (network.rank() + network.size() - 1) % network.size();
    Buffer got(whole.size());
    const Tickets tickets = {network.post_send(next, 0, parts), receive(network, previous, 0, got)};
    ASSERT_TRUE(network.wait(tickets, wait_seconds(20)).ok());
    EXPECT_TRUE(got == pattern(whole.size(), static_cast<unsigned>(previous)));
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, TcpExchange,
                         ::testing::Values(Shape{2, 1, 1}, Shape{3, 1, 1}, Shape{4, 1, 1}, Shape{2, 3, 1},
                                           Shape{3, 2, 3}, Shape{4, 2, 2}),
                         ::testing::PrintToStringParamName());

TEST(TcpNetwork, HugeMessagesInBothDirectionsAtOnce) {
  for (const int connections : {1, 3}) {
    TcpGroup group(2, 1, connections);
    group.run([](TcpNetwork& network) {
      // A sanitizer takes half a minute for 64 MiB.
      const std::size_t bytes = ((kSlowness > 1.0 ? std::size_t{8} : std::size_t{64}) << 20) + 13;
      const Buffer sent = pattern(bytes, static_cast<unsigned>(network.rank()));
      Buffer got(bytes);
      const Tickets tickets = {send(network, 1 - network.rank(), 0, sent),
                               receive(network, 1 - network.rank(), 0, got)};
      ASSERT_TRUE(network.wait(tickets, wait_seconds(60)).ok());
      ASSERT_TRUE(got == pattern(bytes, static_cast<unsigned>(1 - network.rank())));
    });
  }
}

// A channel on which nothing is posted holds up itself alone.
TEST(TcpNetwork, ChannelsDoNotWaitForEachOther) {
  TcpGroup group(2, 2, 2);
  group.run([](TcpNetwork& network) {
    const int peer = 1 - network.rank();
    const Buffer large = pattern(std::size_t{32} << 20, 1);
    const Buffer small = pattern(1000, 2);
    Buffer got_large(large.size());
    Buffer got_small(small.size());
    const Tickets held_up = {send(network, peer, 0, large)};
    for (int i = 0; i < 10; ++i) {
      const Tickets tickets = {send(network, peer, 1, small), receive(network, peer, 1, got_small)};
      ASSERT_TRUE(network.wait(tickets, wait_seconds(20)).ok());
      EXPECT_TRUE(got_small == small);
    }
    EXPECT_FALSE(network.done(held_up[0])) << "32 MiB cannot lie in the kernel's buffers";
    const Tickets last = {receive(network, peer, 0, got_large), held_up[0]};
    ASSERT_TRUE(network.wait(last, wait_seconds(20)).ok());
    EXPECT_TRUE(got_large == large);
  });
}

TEST(TcpNetwork, StripesFollowTheWeights) {
  TcpGroup group(2, 1, 4);
  group.run([](TcpNetwork& network) {
    const int peer = 1 - network.rank();
    ASSERT_EQ(network.stripes(peer, 0), 4u);
    const std::vector<std::uint32_t> all_weights[] = {
        {1, 1, 1, 1}, {0, 0, 1, 0}, {5, 0, 1, 2}, {1, 2, 3, 1000}};
    for (const auto& weights : all_weights) {
      network.set_weights(peer, 0, weights);  // each rank for what it sends
      exchange_messages(network, {1000000, 100, 70000, 0, 1234567});
    }
    error_of(ErrorKind::kUsage, [&] { network.set_weights(peer, 0, std::vector<std::uint32_t>{1, 2}); });
    error_of(ErrorKind::kUsage,
             [&] { network.set_weights(peer, 0, std::vector<std::uint32_t>{0, 0, 0, 0}); });
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
    const Buffer sent = pattern(100, static_cast<unsigned>(network.rank()));
    Buffer got(100);
    const Tickets tickets = {send(network, next, 1, sent), receive(network, previous, 1, got)};
    ASSERT_TRUE(network.wait(tickets, wait_seconds(20)).ok());
    EXPECT_TRUE(got == pattern(100, static_cast<unsigned>(previous)));
    expect_text(error_of(ErrorKind::kInternal, [&] { send(network, next, 0, sent); }), "no link to rank");
    expect_text(error_of(ErrorKind::kInternal, [&] { send(network, (network.rank() + 2) % 4, 1, sent); }),
                "no link to rank");
    // More of it later; a peer that is ahead would make its side of it.
    looked.count_down();
    looked.wait();
    network.connect(all_links(network), wait_seconds(20));
    exchange_messages(network, {10, 100000});
  });
}

TEST(TcpNetwork, LengthsThatDifferAreAMismatchOnBothSides) {
  for (const std::size_t expected : {0, 15, 17, 200000}) {
    TcpGroup group(2);
    group.run([&](TcpNetwork& network) {
      Buffer message(network.rank() == 0 ? 16 : expected);
      Tickets tickets;
      if (network.rank() == 0) tickets.push_back(send(network, 1, 0, message));
      Buffer more(8);
      tickets.push_back(network.rank() == 0 ? receive(network, 1, 0, more) : receive(network, 0, 0, message));
      ASSERT_EQ(network.wait(tickets, wait_seconds(20)).outcome, Outcome::kAborted);
      AbortRecord record;
      ASSERT_TRUE(network.aborted(&record));
      EXPECT_EQ(record.kind, ErrorKind::kMismatch);
      EXPECT_EQ(record.origin, 1);
      EXPECT_NE(record.message.find("rank 0"), std::string::npos) << record.message;
      EXPECT_NE(record.message.find("sent 16 bytes as message 1 on channel 0, where rank 1 expects " +
                                    std::to_string(expected) + " bytes"),
                std::string::npos)
          << record.message;
    });
  }
}

TEST(TcpNetwork, TicketsAreUsedUpOnce) {
  TcpGroup group(2);
  group.run([](TcpNetwork& network) {
    const Buffer sent = pattern(8, 1);
    Buffer got(8);
    const Tickets tickets = {send(network, 1 - network.rank(), 0, sent),
                             receive(network, 1 - network.rank(), 0, got)};
    ASSERT_TRUE(network.wait(tickets, wait_seconds(20)).ok());
    expect_text(error_of(ErrorKind::kInternal, [&] { network.wait(tickets, wait_seconds(20)); }),
                "used before");
    EXPECT_FALSE(network.done(tickets[0]));
  });
}

TEST(TcpNetwork, TimeoutLeavesMessagesAsTheyAre) {
  TcpGroup group(2);
  group.run([](TcpNetwork& network) {
    const int peer = 1 - network.rank();
    Buffer got(8);
    if (network.rank() == 0) {
      const Tickets tickets = {receive(network, peer, 0, got)};
      EXPECT_EQ(network.wait(tickets, wait_seconds(0.05)).outcome, Outcome::kTimeout);
      std::atomic<bool> cancelled = true;
      WaitOptions waiting = wait_seconds(20);
      waiting.cancelled = &cancelled;
      EXPECT_EQ(network.wait(tickets, waiting).outcome, Outcome::kCancelled);
      const std::function<void()> interrupt = [] { throw std::runtime_error("Ctrl-C"); };
      waiting.cancelled = nullptr;
      waiting.interrupt = &interrupt;
      EXPECT_THROW(network.wait(tickets, waiting), std::runtime_error);
      const Buffer go = pattern(1, 0);
      const Tickets going = {send(network, peer, 0, go)};
      ASSERT_TRUE(network.wait(going, wait_seconds(20)).ok());
      ASSERT_TRUE(network.wait(tickets, wait_seconds(20)).ok());
      EXPECT_TRUE(got == pattern(8, 3));
    } else {
      Buffer go(1);
      const Tickets first = {receive(network, peer, 0, go)};
      ASSERT_TRUE(network.wait(first, wait_seconds(20)).ok());
      const Buffer sent = pattern(8, 3);
      const Tickets second = {send(network, peer, 0, sent)};
      ASSERT_TRUE(network.wait(second, wait_seconds(20)).ok());
    }
  });
}

TEST(TcpNetwork, GivenUpMessagesGiveTheirMemoryBack) {
  TcpGroup group(2);
  group.run([](TcpNetwork& network) {
    const int peer = 1 - network.rank();
    {
      const Buffer large = pattern(std::size_t{32} << 20, 1);
      Buffer got(large.size());
      Tickets tickets = {send(network, peer, 0, large)};
      if (network.rank() == 0) tickets.push_back(receive(network, peer, 0, got));
      // Not long enough for all of it.
      network.progress();
      EXPECT_EQ(network.wait(tickets, wait_seconds(0)).outcome, Outcome::kTimeout);
      network.give_up(tickets);
    }  // a write into freed memory is what the sanitizer finds
    for (int i = 0; i < 20; ++i) network.progress();
    Buffer more(1);
    expect_text(error_of(ErrorKind::kInternal, [&] { receive(network, peer, 0, more); }), "given up");
  });
}

// The peer is there: nobody is to look for the reason on its host.
TEST(TcpNetwork, WhatIsOutOfStepIsNotALostPeer) {
  TcpGroup group(2, 2);
  group.run([](TcpNetwork& network) {
    const int peer = 1 - network.rank();
    Buffer first(8);
    Buffer second(8);
    const Tickets given_up = {receive(network, peer, 0, first)};
    const Tickets kept = {receive(network, peer, 0, second)};
    network.give_up(given_up);
    const Error error = error_of(ErrorKind::kInternal, [&] { network.wait(kept, wait_seconds(20)); });
    expect_text(error, "message 2 on channel 0 between rank");
    expect_text(error, "gave up another one");
    network.give_up(kept);
    const Tickets other = {send(network, peer, 1, first), receive(network, peer, 1, second)};
    EXPECT_TRUE(network.wait(other, wait_seconds(20)).ok()) << "the other channel is in step";
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
