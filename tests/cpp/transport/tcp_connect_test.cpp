// What ranks are told that cannot connect over TCP.

#include <sys/resource.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <deque>
#include <limits>
#include <thread>

#include "support/errors.h"
#include "support/network/raw_peer.h"
#include "support/network/tcp_group.h"
#include "support/threads.h"
#include "transport/tcp/handshake/connect_errors.h"

namespace multiring {
namespace {

using namespace testing;

/// Expects this error of connecting `links`, or all.
template <class... Fragments>
Error connect_error(ErrorKind kind, TcpNetwork& network, const std::vector<Network::Link>& links,
                    double seconds, const Fragments&... fragments) {
  return error_of(kind, [&] { network.connect(links, wait_seconds(seconds)); }, fragments...);
}
template <class... Fragments>
Error connect_error(ErrorKind kind, TcpNetwork& network, double seconds, const Fragments&... fragments) {
  return connect_error(kind, network, all_links(network), seconds, fragments...);
}

TEST(TcpConnect, AnotherSecretIsTold) {
  TcpGroup group(2);
  group.options(1).secret = "another";
  group.run_unconnected([](TcpNetwork& network) {
    if (network.rank() == 1) {
      connect_error(ErrorKind::kUsage, network, 20, "rank 1 on ", "does not know the secret of rank 0 on ",
                    "at 127.0.0.1:");
    } else {
      progress_until(network, [&] { return network.rejected().unauthenticated >= 1; });
      connect_error(ErrorKind::kTimeout, network, 0.1, "clients did not know the job's secret");
    }
  });
}

TEST(TcpConnect, AnotherJobWithTheSameSecretIsAnother) {
  TcpGroup group(2);
  TcpOptions other = tcp_options(1, 2);
  other.job = "another";
  TcpNetwork zero(group.store(), group.options(0));
  group.store().set("tcp/another/0", group.store().get("tcp/test/0", 1, {}), {});
  TcpNetwork one(group.store(), other);
  beside(zero, [&] { connect_error(ErrorKind::kUsage, one, 20, "does not know the secret"); });
  connect_error(ErrorKind::kTimeout, zero, 0.1);
}

TEST(TcpConnect, OtherSettingsAreToldOnBothSides) {
  TcpGroup group(2);
  group.options(1).channels = 2;
  group.run_unconnected(
      [](TcpNetwork& network) { connect_error(ErrorKind::kUsage, network, 20, "other settings"); });
}

TEST(TcpConnect, TwoProcessesOfOneRankAreTold) {
  InprocStore store;
  TcpNetwork zero(store, tcp_options(0, 2));
  TcpNetwork one(store, tcp_options(1, 2));
  TcpNetwork double_of_one(store, tcp_options(1, 2));
  connect_both(zero, one);
  beside(zero,
         [&] { connect_error(ErrorKind::kUsage, double_of_one, 20, "two processes claim to be rank 1"); });
}

TEST(TcpConnect, ARankThatDoesNotComeIsNamed) {
  InprocStore store;
  TcpNetwork network(store, tcp_options(1, 3));
  const Error error = connect_error(ErrorKind::kTimeout, network, {{0, 0}}, 0.1,
                                    "waited for rank 0, which has published no address");
  EXPECT_EQ(error.context().peer, 0);
  connect_error(ErrorKind::kTimeout, network, {{2, 0}}, 0.1,
                "waited for a connection from rank 2 at 127.0.0.1:");
  // It is there and does something else.
  TcpNetwork zero(store, tcp_options(0, 3));
  connect_error(ErrorKind::kTimeout, network, {{0, 0}}, 0.3, "its host answers, the rank does not");
}

TEST(TcpConnect, ARankThatHasEndedIsNamedWithBothAddresses) {
  InprocStore store;
  TcpNetwork network(store, tcp_options(1, 2));
  TcpNetwork(store, tcp_options(0, 2));  // has come and gone
  connect_error(ErrorKind::kPeerLost, network, 20, "cannot connect to rank 0 on ",
                "127.0.0.1 (lo) to 127.0.0.1:", "Connection refused");
}

// A connection that ends does not tell why.
TEST(TcpConnect, ARankWhoseConnectionEndsWhileMoreAreAwaitedIsNamed) {
  InprocStore store;
  TcpNetwork zero(store, tcp_options(0, 2, 2));
  {
    TcpNetwork one(store, tcp_options(1, 2, 2));
    const Network::Link to_one[] = {{1, 0}};
    const Network::Link to_zero[] = {{0, 0}};
    beside(zero, [&] { one.connect(to_zero, wait_seconds(20)); });
    zero.connect(to_one, wait_seconds(20));
  }
  const Error error =
      connect_error(ErrorKind::kPeerLost, zero, {{1, 1}}, 20, "lost its connection to rank 1 on ",
                    "it has ended, or the network between them is cut. Look at its output");
  EXPECT_EQ(error.context().peer, 1);
}

TEST(TcpConnect, AnAddressThatCannotBeReachedIsNamed) {
  InprocStore store;
  TcpNetwork network(store, tcp_options(1, 2));
  store.set("tcp/test/0", "far\n1\neth0 203.0.113.1 24 4711 0", {});  // not from a loopback address
  connect_error(ErrorKind::kUsage, network, 20,
                "cannot reach rank 0 on far: 127.0.0.1 (lo) to 203.0.113.1:4711 (eth0)",
                "MULTIRING_INTERFACES");
  TcpNetwork other(store, tcp_options(1, 2));
  store.set("tcp/test/0", "far\n1\neth0 fd00::1 64 4711 0", {});
  connect_error(ErrorKind::kUsage, other, 20, "no address of the family");
}

/// Rank 1, and what answers at the address of rank 0.
class TcpConnectToListener : public ::testing::Test {
 protected:
  TcpConnectToListener() { store.set("tcp/test/0", listener.endpoint(), {}); }
  InprocStore store;
  RawListener listener;
  TcpNetwork network{store, tcp_options(1, 2)};
};

TEST_F(TcpConnectToListener, SomebodyElseInTheRanksPlaceIsNotBelieved) {
  const std::jthread intruder(
      [&] { listener.accept().say("HTTP/1.1 400 Bad Request\r\nServer: something\r\n\r\n"); });
  connect_error(ErrorKind::kPeerLost, network, 20,
                "did not reach rank 0 on elsewhere: a process that is not part of this job answered");
}

TEST_F(TcpConnectToListener, AListenerThatDoesNotKnowTheSecretIsNotBelieved) {
  const std::jthread impostor([&] {
    RawPeer caller = listener.accept();
    caller.say(tcp::encode_challenge(tcp::random_nonce()));
    tcp::ClientHelloBytes hello;
    EXPECT_TRUE(caller.hear(hello));
    caller.say(tcp::encode_server_hello(tcp::derive_handshake_key("guess", "test"), {}, {}, {},
                                        tcp::Verdict::kAccepted));
  });
  connect_error(ErrorKind::kPeerLost, network, 20, "not part of this job");
}

/// Connects in a thread until the test has seen what it wants; expects that it was still trying then.
class Trying {
 public:
  explicit Trying(TcpNetwork& network)
      : thread_([this, &network] {
          WaitOptions waiting = wait_seconds(60);
          waiting.cancelled = &cancelled_;
          error_of(
              ErrorKind::kAborted, [&] { network.connect(all_links(network), waiting); },
              "connecting was cancelled");
        }) {}
  ~Trying() {
    cancelled_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> cancelled_ = false;
  std::thread thread_;
};

TEST_F(TcpConnectToListener, AHandshakeThatIsBrokenOffIsTriedAgain) {
  const Trying trying(network);
  for (int i = 0; i < 6; ++i) {  // two connections are wanted
    RawPeer caller{UniqueFd()};
    ASSERT_TRUE(listener.accept_within(20, caller)) << "after " << i;
  }
}

TEST(TcpConnect, AHostThatVanishesInTheMiddleOfAHandshakeIsCalledAgain) {
  InprocStore store;
  RawListener listener;
  TcpOptions options = tcp_options(1, 2);
  options.heartbeat = 1.0;
  TcpNetwork network(store, options);
  store.set("tcp/test/0", listener.endpoint(), {});
  const Trying trying(network);
  std::deque<RawPeer> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back(UniqueFd());
    ASSERT_TRUE(listener.accept_within(20, callers.back())) << "after " << i;
    if (i % 2 == 0) callers.back().say(tcp::encode_challenge(tcp::random_nonce()));
    callers.back().cut_off();
  }
}

// Plans connect in both ranks, messages in one, or in both: all of them need the same control connection.
TEST(TcpConnect, ThreadsConnectDifferentLinksOfAPairAtOnce) {
  constexpr int kPlans = 0, kMessages = 1, kTimes = 50;
  for (int time = 0; time < kTimes; ++time) {
    TcpGroup group(2, 2, 2);
    group.run_unconnected([&](TcpNetwork& network) {
      const int peer = 1 - network.rank();
      const std::vector<Network::Link> plans = {{peer, kPlans}}, messages = {{peer, kMessages}};
      in_threads(2, [&](int thread) {
        if (thread == 0) return network.connect(plans, wait_seconds(20));
        if (time % 3 == network.rank()) return;
        const WaitResult result = network.connect_on_demand(messages, wait_seconds(20));
        EXPECT_TRUE(result.ok());
      });
      Payload sent = pattern(100000, 1);
      for (const int channel : {kPlans, kMessages}) {
        progress_until(network, [&] { return network.linked({peer, channel}); });
        Payload got(sent.size());
        ASSERT_TRUE(
            await(network, {send(network, peer, channel, sent), receive(network, peer, channel, got)}).ok());
        EXPECT_TRUE(got == sent);
      }
    });
  }
}

// A call that fails ends its own attempts; the other thread's are made, of which one may be for both.
TEST(TcpConnect, AThreadThatGivesUpDoesNotKeepAnotherFromConnecting) {
  InprocStore store;
  TcpNetwork one(store, tcp_options(1, 2, 2));
  TcpNetwork zero(store, tcp_options(0, 2, 2));
  const std::vector<Network::Link> first = {{0, 0}}, second = {{0, 1}};
  Latch started(1);
  const std::jthread other([&] {
    started.count_down();
    EXPECT_TRUE(one.connect_on_demand(second, wait_seconds(20)).ok());
  });
  started.wait();
  connect_error(ErrorKind::kTimeout, one, first, 0.3, "its host answers, the rank does not");
  progress_until(zero, [&] { return zero.linked({1, 1}); });
}

TEST(TcpConnect, CanBeRepeated) {
  InprocStore store;
  TcpNetwork zero(store, tcp_options(0, 2, 2, 3));
  TcpNetwork one(store, tcp_options(1, 2, 2, 3));
  connect_error(ErrorKind::kTimeout, one, 0.1);
  connect_error(ErrorKind::kTimeout, zero, 0.1);
  connect_both(zero, one);
}

// What an attempt that was given up has left behind is replaced.
TEST(TcpConnect, ConnectionsThatEndedBeforeAllWereMadeAreMadeAnew) {
  InprocStore store;
  const TcpOptions options = tcp_options(0, 2);
  TcpNetwork network(store, options);
  constexpr int kControl = tcp::ConnectionInfo::kControl;
  std::deque<RawPeer> kept;
  const auto introduced = [&](int channel, int stripe) {
    kept.emplace_back(network);
    bool welcome = false;
    beside(network,
           [&] { welcome = kept.back().introduce(options, facts_of_rank_1(options, channel, stripe, 2)); });
    return welcome;
  };
  EXPECT_TRUE(introduced(0, 0));
  kept.clear();
  for (int i = 0; i < 100; ++i) network.progress();
  EXPECT_TRUE(introduced(kControl, 0));
  EXPECT_TRUE(introduced(0, 0));
  EXPECT_FALSE(introduced(0, 0)) << "stands now";
  EXPECT_TRUE(introduced(0, 1));
  network.connect(all_links(network), wait_seconds(20));
}

TEST(TcpConnect, AComplaintAboutOneRankDoesNotConcernOthers) {
  InprocStore store;
  TcpNetwork zero(store, tcp_options(0, 3));
  TcpNetwork one(store, tcp_options(1, 3));
  TcpNetwork two(store, tcp_options(2, 3, 2));  // other settings
  const Network::Link to_zero[] = {{0, 0}};
  const Network::Link to_one[] = {{1, 0}};
  beside(zero, [&] { connect_error(ErrorKind::kUsage, two, {{0, 0}}, 20); });
  std::jthread other([&] { one.connect(to_zero, wait_seconds(20)); });
  zero.connect(to_one, wait_seconds(20));
  other.join();
  connect_error(ErrorKind::kUsage, zero, {{2, 0}}, 20, "other settings than rank 2 on " + zero.host(0));
  connect_error(ErrorKind::kTimeout, zero, {{2, 0}}, 0.1);  // told once
}

TEST(TcpConnect, TheHostOfARankThatDoesNotCallIsNamed) {
  InprocStore store;
  TcpNetwork zero(store, tcp_options(0, 2));
  EXPECT_EQ(zero.host(1), "");
  store.set("tcp/test/1", "far\n1\neth0 203.0.113.1 24 4711 0", {});
  connect_error(ErrorKind::kTimeout, zero, 0.1, "from rank 1 on far at 127.0.0.1:");
  EXPECT_EQ(zero.host(1), "far");
}

TEST_F(TcpConnectToListener, ALackOfDescriptorsIsToldAsThat) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none = {0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  connect_error(ErrorKind::kUsage, network, 20,
                "has no descriptor left for a connection to rank 0 on elsewhere", "ulimit -n");
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST_F(TcpConnectToListener, EndsWhenItsRankLeaves) {
  std::jthread other([&] {
    RawPeer caller{UniqueFd()};
    EXPECT_TRUE(listener.accept_within(20, caller));
    network.leave();
  });
  connect_error(ErrorKind::kAborted, network, 20, "rank 1 has left");
  other.join();
  connect_error(ErrorKind::kInternal, network, 20, "rank 1 has left");
}

TEST(TcpConnect, OptionsThatCannotBeAreToldOf) {
  InprocStore store;
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double heartbeat : {0.5, infinity, std::nan(""), 1e9}) {
    TcpOptions options = tcp_options(0, 2);
    options.heartbeat = heartbeat;
    expect_usage([&] { TcpNetwork(store, options); }, "heartbeat");
  }
}

TEST(TcpConnect, ANetworkThatIsGoneIsALossForRanksThatWereConnected) {
  InprocStore store;
  TcpOptions options = tcp_options(1, 3);
  options.interfaces = {"gone0"};
  error_of(ErrorKind::kUsage, [&] { TcpNetwork(store, options); }, "no interface of this host");
  options.connected_before = true;
  options.world = {2, 7, 9};
  error_of(
      ErrorKind::kPeerLost, [&] { TcpNetwork(store, options); },
      " lost the ranks of all other hosts: its network is gone, no interface");
}

TEST(TcpConnect, AHostThatIsGoneIsALossForRanksThatWereConnected) {
  const auto kind_of = [](int error, bool connected_before) {
    tcp::ConnectAttempt attempt;
    attempt.state = tcp::ConnectAttempt::State::kFailed;
    attempt.error = error;
    tcp::RankPair ranks;
    ranks.rank = 0;
    ranks.peer = 1;
    ranks.connected_before = connected_before;
    return tcp::attempt_error(ranks, attempt).kind();
  };
  for (const int error :
       {EHOSTUNREACH, ENETUNREACH, EHOSTDOWN, ENETDOWN, ENONET, EACCES, EPERM, EINVAL, EADDRNOTAVAIL}) {
    EXPECT_EQ(kind_of(error, true), ErrorKind::kPeerLost) << error;
    const bool at_any_time = error == EHOSTUNREACH;
    EXPECT_EQ(kind_of(error, false), at_any_time ? ErrorKind::kPeerLost : ErrorKind::kUsage) << error;
  }
  EXPECT_EQ(kind_of(EMFILE, true), ErrorKind::kUsage);
}

// The kernel counts at most 127 probes.
TEST(TcpConnect, AHeartbeatMayBeLong) {
  for (const double seconds : {159.0, 1000.0, 86400.0}) {
    TcpGroup group(2);
    for (int rank = 0; rank < 2; ++rank) group.options(rank).heartbeat = seconds;
    group.run([](TcpNetwork&) {});
  }
}

}  // namespace
}  // namespace multiring
