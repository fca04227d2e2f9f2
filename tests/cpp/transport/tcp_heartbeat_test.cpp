// Hosts that vanish and paths that break, as ranks over TCP find out.

#include <linux/filter.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "support/errors.h"
#include "support/network/tcp_group.h"
#include "support/stopwatch.h"

namespace multiring {
namespace {

using namespace testing;

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

/// Runs `body` in a network of its own, which can be switched off; skips the test if there can be none.
void in_own_network(const std::function<void()>& body) {
  bool made = false;
  in_threads(1, [&](int) {
    // Of this thread and of those that it starts.
    made = ::unshare(CLONE_NEWNET) == 0 && set_loopback(true);
    if (made) body();
  });
  if (!made) GTEST_SKIP() << "a network namespace of its own cannot be made (needs CAP_SYS_ADMIN)";
}

TEST(TcpHeartbeat, FindsAHostThatVanished) {
  in_own_network([] {
    TcpGroup group(2);
    for (int rank = 0; rank < 2; ++rank) group.options(rank).heartbeat = 2.0;
    Latch both(2);
    std::atomic<bool> off = false;
    group.run([&](TcpNetwork& network) {
      both.arrive_and_wait();
      const auto start = Clock::now();
      const Stopwatch watch;
      if (!off.exchange(true)) {
        ASSERT_TRUE(set_loopback(false));
      }
      expect_lost(wait_until_it_fails(network, 1 - network.rank(), 30), 1 - network.rank(), false);
      EXPECT_GT(seconds_between(start, Clock::now()), 0.9);
      EXPECT_LT(watch.seconds(), 4.0 * kSlowness);
    });
  });
}

// A group that is made while a link flaps.
TEST(TcpHeartbeat, ANetworkThatIsMadeWaitsForALinkThatFlaps) {
  in_own_network([] {
    InprocStore store;
    TcpOptions options = tcp_options(0, 2);
    options.connected_before = true;
    options.heartbeat = 60.0;
    ASSERT_TRUE(set_loopback(false));
    int looks = 0;
    const std::function<void()> repair = [&] {  // the link is up again after the third look
      if (++looks == 3) {
        EXPECT_TRUE(set_loopback(true));
      }
    };
    {
      const TcpNetwork network(store, options, wait_seconds(30).with_interrupt(repair));
    }
    EXPECT_EQ(looks, 3);
    options.heartbeat = 1.0;
    options.job = "later";
    ASSERT_TRUE(set_loopback(false));
    const auto make = [&] { const TcpNetwork network(store, options); };
    error_of(ErrorKind::kPeerLost, make, "its network is gone");
    options.connected_before = false;  // an interface that is not there is the program's mistake
    expect_usage(make, "no interface of this host is left");
  });
}

// What one network of a process has found, the others need not wait for.
TEST(TcpHeartbeat, WhatOneNetworkFindsAllKnow) {
  constexpr double kSoon = 1.0, kLate = 600.0;
  in_own_network([] {
    InprocStore store;
    std::vector<std::unique_ptr<TcpNetwork>> networks;
    std::vector<TcpOptions> options{tcp_options(0, 2), tcp_options(1, 2)};
    for (const double heartbeat : {kSoon, kLate}) {
      for (TcpOptions& each : options) {
        each.heartbeat = heartbeat;
        each.job = std::to_string(heartbeat);
        networks.push_back(std::make_unique<TcpNetwork>(store, each));
      }
      connect_both(**(networks.end() - 2), *networks.back());
    }
    options[0].job = "unconnected";
    TcpNetwork unconnected(nullptr, options[0]);
    unconnected.learn(1, networks[3]->address());
    ASSERT_TRUE(set_loopback(false));
    progress_until(*networks[0], [&] { return options[0].lost_ranks->contains(1); });
    expect_lost(wait_until_it_fails(*networks[2], 1, 30), 1, false);
    // A connection that is not there yet would not even be refused.
    const Network::Link link{1, 0};
    expect_lost(unconnected.connect_on_demand({&link, 1}, wait_seconds(30)), 1, false);
    const Stopwatch watch;
    for (const auto& network : {networks[0].get(), networks[2].get()}) network->leave();
    networks[2].reset();
    EXPECT_LT(watch.seconds(), kLate / 2);
  });
}

// Not each of its networks once more.
TEST(TcpHeartbeat, AHostThatVanishedDelaysWhoLeavesOnce) {
  constexpr double kHeartbeat = 2.0;
  in_own_network([] {
    InprocStore store;
    std::vector<std::unique_ptr<TcpNetwork>> networks;
    for (const char* job : {"first", "second", "third"}) {
      for (int rank = 0; rank < 2; ++rank) {
        TcpOptions options = tcp_options(rank, 2);
        options.heartbeat = kHeartbeat;
        options.job = job;
        networks.push_back(std::make_unique<TcpNetwork>(store, options));
      }
      connect_both(**(networks.end() - 2), *networks.back());
    }
    ASSERT_TRUE(set_loopback(false));
    const Stopwatch watch;
    for (const auto& network : networks) network->leave();
    networks.clear();
    EXPECT_LT(watch.seconds(), 2 * kHeartbeat * kSlowness);
  });
}

TEST(TcpHeartbeat, FindsOneThatVanishedInTheMiddleOfAMessage) {
  in_own_network([] {
    TcpGroup group(2, 1, 2);
    for (int rank = 0; rank < 2; ++rank) group.options(rank).heartbeat = 2.0;
    Latch off(1);
    group.run([&](TcpNetwork& network) {
      Payload large(std::size_t{64} << 20);
      Tickets tickets;
      if (network.rank() == 1) {
        tickets = {send(network, 0, 0, large)};
        EXPECT_EQ(await(network, tickets, 0.2).outcome, Outcome::kTimeout);
        ASSERT_TRUE(set_loopback(false));
        off.count_down();
      } else {
        off.wait();
        tickets = {receive(network, 1, 0, large)};
      }
      expect_lost(await(network, tickets, 30), 1 - network.rank());
      network.give_up(tickets);
    });
  });
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
      const Payload large(bytes);
      Payload got(bytes);
      Tickets tickets;
      if (bytes > 1000) tickets.push_back(send(network, peer, 0, large));
      for (int i = 0; i < 100; ++i) network.progress();
      full.arrive_and_wait();
      if (network.rank() == 0) {
        EXPECT_EQ(cut_data_connections(), 2);
        cut.count_down();
      }
      cut.wait();
      if (bytes == 1000) tickets.push_back(send(network, peer, 0, large));
      tickets.push_back(receive(network, peer, 0, got));
      const auto start = Clock::now();
      expect_lost(await(network, tickets), peer, false);
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
    const Payload large = pattern(std::size_t{32} << 20, 3);
    if (network.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::seconds(3));  // what is tested
      Payload got(large.size());
      ASSERT_TRUE(await(network, {receive(network, 1, 0, got)}).ok());
      EXPECT_TRUE(got == large);
    } else {
      EXPECT_TRUE(await(network, {send(network, 0, 0, large)}).ok());
    }
  });
}

// An address of IPv6 cannot be listened on in the second in which the kernel asks whether another host has
// it.
TEST(TcpInterfaces, AnAddressThatIsNotReadyIsLeftOut) {
  in_own_network([] {
    const bool made =
        std::system(
            "{ ip link add ta type veth peer name tb && ip link set ta up && ip link set tb up && "
            "ip addr add 10.98.0.1/24 dev ta label ta:one && ip addr add fd98::1/64 dev ta; } "
            ">/dev/null 2>&1") == 0;
    if (!made) GTEST_SKIP() << "an interface of its own cannot be made (needs ip)";
    InprocStore store;
    TcpOptions options = tcp_options(0, 2);
    options.interfaces = {"ta"};
    options.local = false;
    const TcpNetwork network(store, options);
    ASSERT_FALSE(network.addresses().empty());
    EXPECT_EQ(network.addresses().front().address.host_text(), "10.98.0.1");
    EXPECT_EQ(network.addresses().front().interface, "ta");
  });
}

}  // namespace
}  // namespace multiring
