// Connections that one rank makes when it needs them, whatever the other one does.

#include <atomic>
#include <thread>
#include <vector>

#include "support/errors.h"
#include "support/network/tcp_group.h"

namespace multiring {
namespace {

using namespace testing;

bool all_linked(const TcpNetwork& network) {
  return std::ranges::all_of(all_links(network), [&](const auto& link) { return network.linked(link); });
}

WaitResult reach_all(TcpNetwork& network, double seconds = 20) {
  return network.connect_on_demand(all_links(network), wait_seconds(seconds));
}

class TcpReachFrom : public ::testing::TestWithParam<int> {};

TEST_P(TcpReachFrom, OneEndIsEnough) {
  TcpGroup group(2, 2, 3);
  group.run_unconnected([&](TcpNetwork& network) {
    EXPECT_FALSE(all_linked(network));
    const std::uint64_t before = network.links_version();
    if (network.rank() == GetParam()) {
      EXPECT_TRUE(reach_all(network).ok());
    } else {
      progress_until(network, [&] { return all_linked(network); });
    }
    EXPECT_NE(network.links_version(), before);
    exchange_messages(network, {200'001});  // striped
    EXPECT_TRUE(reach_all(network, 0.0).ok()) << "it stands already";
  });
}

INSTANTIATE_TEST_SUITE_P(LowerAndHigher, TcpReachFrom, ::testing::Values(0, 1));

// Of two that call each other at the same time one is answered, in all orders in which that can happen.
TEST(TcpReach, CallsThatCrossMakeOneConnection) {
  constexpr int kSize = 3;
  constexpr int kChannels = 2;
  constexpr int kConnections = 2;
  for (int repetition = 0; repetition < 60; ++repetition) {
    TcpGroup group(kSize, kChannels, kConnections);
    Latch start(kSize);
    Latch done(kSize);
    std::atomic<bool> counted = false;
    const int before = open_descriptors();
    std::atomic<int> idle{0};  // descriptors of networks without a connection
    group.run_unconnected([&](TcpNetwork& network) {
      start.arrive_and_wait();
      if (network.rank() == 0) idle = open_descriptors() - before;
      done.arrive_and_wait();
      // Some come a little later, some in short turns between which they do something else.
      const auto links = all_links(network);
      if (network.rank() == 1)
        for (int i = 0; i < repetition % 20; ++i) network.progress();
      const double turn = repetition % 2 == 0 ? 20.0 : 0.0005;
      const WaitOptions limit = wait_seconds(20);
      WaitResult result{Outcome::kTimeout};
      while (result.outcome == Outcome::kTimeout && !limit.deadline.expired())
        result = network.connect_on_demand(links, wait_seconds(turn));
      ASSERT_TRUE(result.ok());
      exchange_messages(network, {200'001});  // striped
      for (const auto& [peer, channel] : links) ASSERT_EQ(network.stripes(peer, channel), kConnections);
      // Both ends of a control connection and of those of the channels for each pair, once all others are
      // closed.
      constexpr int kPairs = kSize * (kSize - 1) / 2;
      constexpr int kWanted = 2 * kPairs * (1 + kChannels * kConnections);
      progress_until(network, [&] {  // to count them takes one itself, so one counts for all
        if (network.rank() == 0 && open_descriptors() - before - idle == kWanted) counted = true;
        return counted.load();
      });
    });
  }
}

TEST(TcpReach, APeerThatMakesNoProgressAnswersLater) {
  InprocStore store;
  TcpNetwork zero(store, tcp_options(0, 2));
  TcpNetwork one(store, tcp_options(1, 2));
  for (TcpNetwork* caller : {&zero, &one}) EXPECT_EQ(reach_all(*caller, 0.05).outcome, Outcome::kTimeout);
  const WaitOptions limit = wait_seconds(20);
  while (!(all_linked(zero) && all_linked(one)) && !limit.deadline.expired()) {
    zero.progress();
    one.progress();
  }
  EXPECT_TRUE(reach_all(zero).ok());
  EXPECT_TRUE(reach_all(one).ok());
}

TEST(TcpReach, APeerThatHasNotComeIsWaitedFor) {
  InprocStore store;
  TcpNetwork zero(store, tcp_options(0, 2));
  EXPECT_EQ(reach_all(zero, 0.05).outcome, Outcome::kTimeout);
}

// It gets the time that it needs, however short the turns are in which a rank connects.
TEST(TcpReach, AStoreThatAnswersSlowly) {
  class SlowStore final : public Store {
   public:
    void set(const std::string& key, const std::string& value, const WaitOptions& waiting) override {
      store_.set(key, value, waiting);
    }
    std::string get(const std::string& key, double seconds, const WaitOptions& waiting) override {
      if (seconds < 0.01) throw Error(ErrorKind::kTimeout, "no answer yet");
      return store_.get(key, seconds, waiting);
    }

   private:
    InprocStore store_;
  } store;
  TcpNetwork zero(store, tcp_options(0, 2));
  TcpNetwork one(store, tcp_options(1, 2));
  bool reached = false;
  beside(one, [&] {
    for (int turn = 0; turn < 5000 && !reached; ++turn) reached = reach_all(zero, 0.001).ok();
  });
  EXPECT_TRUE(reached);
}

TEST(TcpReach, APeerThatIsGoneIsLost) {
  for (const int caller : {0, 1}) {
    InprocStore store;
    TcpNetwork network(store, tcp_options(caller, 2));
    TcpNetwork(store, tcp_options(1 - caller, 2));  // has come and gone
    for (int attempt = 0; attempt < 2; ++attempt) {
      const WaitResult result = reach_all(network);
      expect_lost(result, 1 - caller);
      EXPECT_TRUE(result.peer_gone);
    }
  }
}

TEST(TcpReach, APeerThatIsLostOnTheWayIsLost) {
  for (const bool leaves : {false, true}) {
    TcpGroup group(2, 2);
    Latch linked(2);
    group.run_unconnected([&](TcpNetwork& network) {
      const std::vector<Network::Link> first = {{1 - network.rank(), 0}};
      ASSERT_TRUE(network.connect_on_demand(first, wait_seconds(20)).ok());
      linked.arrive_and_wait();
      if (network.rank() == 1) {
        if (leaves) network.leave();
        return group.destroy(1);
      }
      const WaitResult result = reach_all(network);
      expect_lost(result, 1);
      EXPECT_TRUE(leaves || !result.peer_left);
    });
  }
}

TEST(TcpReach, AnAbortAndTheOwnEndAreTold) {
  InprocStore store;
  TcpNetwork zero(store, tcp_options(0, 2));
  TcpNetwork one(store, tcp_options(1, 2));
  EXPECT_EQ(reach_all(zero, 0.02).outcome, Outcome::kTimeout);
  zero.abort(Error(ErrorKind::kAborted, "enough"));
  EXPECT_EQ(reach_all(zero).outcome, Outcome::kAborted);
  EXPECT_EQ(reach_all(one, 0.02).outcome, Outcome::kTimeout);
  one.leave();  // with a call under way
  expect_text(error_of(ErrorKind::kInternal, [&] { reach_all(one); }),
              "has left and opens no more connections");
}

TEST(TcpReach, AnotherSecretIsToldToTheCaller) {
  for (const int caller : {0, 1}) {
    InprocStore store;
    TcpOptions strange = tcp_options(caller, 2);
    strange.secret = "another";
    TcpNetwork network(store, strange);
    TcpNetwork other(store, tcp_options(1 - caller, 2));
    beside(other, [&] {
      expect_usage([&] { reach_all(network); },
                   "does not know the secret of rank " + std::to_string(1 - caller));
    });
  }
}

}  // namespace
}  // namespace multiring
