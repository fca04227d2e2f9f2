// Unauthenticated peers at the ports of ranks that connect over TCP.

#include <atomic>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "support/network/raw_peer.h"
#include "support/network/tcp_group.h"

namespace multiring {
namespace {

using namespace testing;

TEST(TcpUnauthenticated, GarbageIsDroppedAndCounted) {
  TcpGroup group(2);
  std::vector<std::string> garbage = {"GET / HTTP/1.1\r\n\r\n", std::string(100000, 'x'),
                                      std::string(1, '\0'), ""};
  for (unsigned i = 0; i < 20; ++i) {
    const Payload random = pattern(108, i);
    garbage.emplace_back(reinterpret_cast<const char*>(random.data()), random.size());
  }
  group.run_unconnected([&](TcpNetwork& network) {
    if (network.rank() == 0) {
      std::deque<RawPeer> intruders;
      for (const std::string& text : garbage) {
        intruders.emplace_back(network).say(text);
        if (text.size() < 2) intruders.back().hang_up();
      }
      network.connect(all_links(network), wait_seconds(20));
      progress_until(network, [&] { return network.rejected().malformed == garbage.size(); });
      for (RawPeer& intruder : intruders) intruder.hang_up();
    } else {
      network.connect(all_links(network), wait_seconds(20));
      EXPECT_EQ(network.rejected().total(), 0u);
    }
    exchange_messages(network, {10});
  });
}

TEST(TcpUnauthenticated, AThousandOfThemLeaveNothing) {
  InprocStore store;
  TcpNetwork network(store, tcp_options(0, 2));
  const int before = open_descriptors();
  for (unsigned i = 1; i <= 1000; ++i) {
    RawPeer(network).say(i % 2 == 0 ? "" : "GET / HTTP/1.1\r\n\r\n");
    if (i % 100 == 0) progress_until(network, [&] { return network.rejected().malformed == i; });
  }
  EXPECT_EQ(open_descriptors(), before);
}

// The others are connecting all the while: the last rank comes when a thousand intruders have been there.
TEST(TcpUnauthenticated, AThousandThatHangUpWhileRanksConnect) {
  const int before = open_descriptors();
  {
    TcpGroup group(3, 2, 2);
    Latch gone(1);
    group.run_unconnected([&](TcpNetwork& network) {
      std::jthread intruders;
      if (network.rank() == 0) {
        intruders = std::jthread([&] {
          for (int i = 0; i < 1000; ++i) {
            RawPeer intruder(network);
            if (i % 3 == 1) intruder.say("MRCPHLO");
            if (i % 3 == 2) intruder.reset();
          }
          gone.count_down();
        });
      }
      if (network.rank() == 2) gone.wait();
      network.connect(all_links(network), wait_seconds(40));
      if (intruders.joinable()) intruders.join();
      // A rank's own connection may be the oldest when there are too many; it is evicted then, and tries
      // again.
      progress_until(network, [&] { return network.rejected().total() >= (network.rank() == 0 ? 1000 : 0); });
      const tcp::RejectedCounts rejected = network.rejected();
      EXPECT_LE(rejected.total() - rejected.evicted, network.rank() == 0 ? 1000u : 0u);
      exchange_messages(network, {100000});
    });
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(TcpUnauthenticated, SlowOnesAreHungUpOn) {
  InprocStore store;
  TcpOptions options = tcp_options(0, 2);
  options.handshake_seconds = 0.2;
  TcpNetwork network(store, options);
  RawPeer silent(network);
  RawPeer slow(network);
  slow.say("MRCPHLO");
  progress_until(network, [&] { return network.rejected().timed_out == 2; });
  EXPECT_TRUE(silent.is_hung_up());
  EXPECT_TRUE(slow.is_hung_up());
}

// A process has a network for each group, and one limit of descriptors for all of them.
TEST(TcpUnauthenticated, TheLimitHoldsForAllNetworksOfAProcess) {
  constexpr int kNetworks = 6, kCallers = 20, kMax = 16;
  InprocStore store;
  TcpOptions options = tcp_options(0, 2);
  options.max_handshakes = kMax;
  options.handshake_seconds = 60;
  std::deque<TcpNetwork> networks;
  for (int i = 0; i < kNetworks; ++i) {
    options.job = "job" + std::to_string(i);
    networks.emplace_back(store, options);
  }
  std::deque<RawPeer> callers;
  std::uint64_t evicted = 0;
  for (TcpNetwork& network : networks) {
    for (int i = 0; i < kCallers; ++i) callers.emplace_back(network);
    // The first network may fill the limit; what is left to the others is what each of them has for itself.
    const std::uint64_t kept = &network == &networks.front() ? kMax : 8;
    progress_until(network, [&] { return network.rejected().evicted == kCallers - kept; });
    evicted += network.rejected().evicted;
  }
  EXPECT_EQ(kNetworks * kCallers - evicted, *options.open_handshakes);
  EXPECT_EQ(*options.open_handshakes, kMax + (kNetworks - 1) * 8u);
  for (RawPeer& caller : callers) caller.hang_up();
  for (TcpNetwork& network : networks)
    progress_until(network, [&] { return network.rejected().total() == kCallers; });
  EXPECT_EQ(*options.open_handshakes, 0u);
}

// Ranks get in while intruders come faster than these are hung up on for being slow.
TEST(TcpUnauthenticated, AFloodOfThemLocksNoRankOut) {
  TcpGroup group(3, 2, 2);
  for (int rank = 0; rank < 3; ++rank) group.options(rank).max_handshakes = 16;
  Latch connected(3);
  group.run_unconnected([&](TcpNetwork& network) {
    std::atomic<bool> stop = false;
    std::thread flood;
    if (network.rank() == 0) {
      flood = std::thread([&] {
        std::deque<RawPeer> intruders;
        for (std::uint64_t opened = 0; !stop;) {
          // No faster than they are accepted, which takes long under a sanitizer: ranks would wait behind
          // all.
          if (opened > network.rejected().total() + 100) {
            std::this_thread::yield();
            continue;
          }
          ++opened;
          intruders.emplace_back(network);
          if (intruders.size() > 100) intruders.pop_front();
        }
      });
      progress_until(network, [&] { return network.rejected().evicted > 50; });
    }
    network.connect(all_links(network), wait_seconds(40));
    stop = true;
    if (flood.joinable()) flood.join();
    connected.arrive_and_wait();
  });
}

}  // namespace
}  // namespace multiring
