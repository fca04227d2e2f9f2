// Rounds among many hosts, which pass from host to host.

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/host_links.h"
#include "collective/exchange.h"
#include "support/errors.h"
#include "support/operations.h"
#include "transport/cluster/arrival_gossip.h"
#include "transport/cluster/mirror_routes.h"

namespace multiring {
namespace {

using namespace testing;

/// The host of each rank, where host h has 1 + h * 5 % most ranks, which take turns.
std::vector<int> uneven_hosts(int count, int most) {
  std::vector<int> hosts;
  for (int turn = 0; turn < most; ++turn)
    for (int host = 0; host < count; ++host)
      if (turn < 1 + host * 5 % most) hosts.push_back(host * 3);
  return hosts;
}

using RoutesOf = std::function<MirrorRoutes(const std::vector<int>& hosts, int rank)>;

std::vector<MirrorRoutes> routes_of_all(const std::vector<int>& hosts, const RoutesOf& routes_of) {
  std::vector<MirrorRoutes> all;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank)
    all.push_back(routes_of(hosts, static_cast<int>(rank)));
  return all;
}

using Sent = std::map<std::pair<int, int>, std::vector<int>>;  // by sender and receiver

/// The messages of a step, as senders and as receivers see them.
std::pair<Sent, Sent> messages_of(const std::vector<MirrorRoutes>& all, std::size_t step) {
  std::pair<Sent, Sent> messages;
  for (std::size_t index = 0; index < all.size(); ++index) {
    const auto rank = static_cast<int>(index);
    for (const MirrorMessage& message : all[index].steps[step].out)
      EXPECT_TRUE(messages.first.emplace(std::pair(rank, message.peer), message.ranks).second);
    for (const MirrorMessage& message : all[index].steps[step].in)
      EXPECT_TRUE(messages.second.emplace(std::pair(message.peer, rank), message.ranks).second);
  }
  return messages;
}

/// All data reaches each receiver once, from a rank that has it by then. `linked`: hosts that may send to
/// each other; null: all may, and a rank sends another one message at most.
void expect_all_comes(const std::vector<int>& hosts, const RoutesOf& routes_of,
                      const std::function<bool(int, int)>& linked = nullptr) {
  const std::vector<MirrorRoutes> all = routes_of_all(hosts, routes_of);
  std::vector<std::set<int>> has;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) has.push_back({static_cast<int>(rank)});
  std::set<std::pair<int, int>> streams;
  for (std::size_t step = 0; step < all[0].steps.size(); ++step) {
    const auto [sent, received] = messages_of(all, step);
    ASSERT_EQ(sent, received);
    const std::vector<std::set<int>> had = has;
    for (const auto& [ends, ranks] : sent) {
      const auto [from, to] = ends;
      if (linked)
        ASSERT_TRUE(linked(hosts[static_cast<std::size_t>(from)], hosts[static_cast<std::size_t>(to)]));
      else
        ASSERT_TRUE(streams.insert(ends).second) << "a second message from " << from << " to " << to;
      ASSERT_NE(hosts[static_cast<std::size_t>(from)], hosts[static_cast<std::size_t>(to)]);
      for (const int rank : ranks) {
        ASSERT_TRUE(had[static_cast<std::size_t>(from)].contains(rank));
        ASSERT_TRUE(has[static_cast<std::size_t>(to)].insert(rank).second) << rank << " comes twice";
        ASSERT_EQ(all[static_cast<std::size_t>(to)].receivers[static_cast<std::size_t>(rank)], to);
      }
    }
  }
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    ASSERT_EQ(all[rank].steps.size(), all[0].steps.size());
    for (std::size_t other = 0; other < hosts.size(); ++other) {
      const auto who = static_cast<std::size_t>(all[rank].receivers[other]);
      ASSERT_EQ(hosts[who], hosts[rank]);
      ASSERT_TRUE(has[who].contains(static_cast<int>(other)));
    }
  }
}

TEST(MirrorRoutes, BringEverythingOnceToAllHosts) {
  for (const int direct : {2, 3, 8})
    for (int count = 1; count <= 30; ++count)
      for (const int most : {1, 2, 5}) {
        SCOPED_TRACE(std::to_string(count) + " hosts of up to " + std::to_string(most) + " ranks, direct " +
                     std::to_string(direct));
        expect_all_comes(uneven_hosts(count, most), [direct](const std::vector<int>& hosts, int rank) {
          return mirror_routes(hosts, rank, direct);
        });
      }
}

TEST(MirrorRoutes, AmongNeighboursPassEverythingOn) {
  for (const HostLinks links : {HostLinks::kRing, HostLinks::kLine})
    for (int count = 2; count <= 12; ++count)
      for (const int most : {1, 2, 5}) {
        SCOPED_TRACE(std::to_string(count) + " hosts of up to " + std::to_string(most) + " ranks, a " +
                     host_links_name(links));
        const auto routes = [links](const std::vector<int>& hosts, int rank) {
          return neighbour_routes(hosts, rank, links == HostLinks::kRing);
        };
        expect_all_comes(uneven_hosts(count, most), routes, [&](int one, int other) {
          return have_link(links, count, one / 3, other / 3);  // see uneven_hosts
        });
      }
}

TEST(MirrorRoutes, TakeFewMessages) {
  const auto messages = [](int hosts) {
    std::vector<int> one_each(static_cast<std::size_t>(hosts));
    std::iota(one_each.begin(), one_each.end(), 0);
    const MirrorRoutes routes = mirror_routes(one_each, hosts / 2);
    std::vector<std::size_t> sent;
    for (const MirrorStep& step : routes.steps) {
      EXPECT_EQ(step.out.size(), step.in.size());
      sent.push_back(step.out.size());
    }
    return sent;
  };
  using Steps = std::vector<std::size_t>;
  EXPECT_EQ(messages(1), Steps{});
  EXPECT_EQ(messages(2), Steps{1});
  EXPECT_EQ(messages(8), Steps{7});
  EXPECT_EQ(messages(9), (Steps{2, 2}));
  EXPECT_EQ(messages(37), (Steps{3, 3, 2}));
  EXPECT_EQ(messages(64), (Steps{3, 3, 3}));
  EXPECT_EQ(messages(256), (Steps{3, 3, 3, 3}));
}

/// Peers that never read; the kernel takes what is sent.
class UnreadNetwork final : public Network {
 public:
  int rank() const override { return 0; }
  int size() const override { return 40; }
  int channels() const override { return 2; }
  std::string host(int) override { return "host"; }
  void connect(std::span<const Link>, const WaitOptions&) override {}
  Ticket post_send(int, int, std::span<const std::span<const std::byte>>) override {
    ++sent;
    return ++tickets_;
  }
  Ticket post_receive(int, int, std::span<std::byte>) override {
    receives_.insert(++tickets_);
    return tickets_;
  }
  WaitResult wait(std::span<const Ticket>, const WaitOptions&) override { return {}; }
  WaitResult wait_any(std::span<const Ticket>, const WaitOptions&) override { return {}; }
  bool done(Ticket ticket) const override { return !receives_.contains(ticket); }
  void give_up(std::span<const Ticket>) override {}
  void progress() override {}
  void abort(const Error&) override {}
  void relay(const AbortRecord&) override {}
  bool aborted(AbortRecord*) const override { return false; }
  void leave() override {}
  void abandon() override {}
  void wake() override {}

  int sent = 0;

 private:
  Ticket tickets_ = 0;
  std::set<Ticket> receives_;
};

TEST(ArrivalGossip, LeavesOneMessageWithARankThatStaysAway) {
  UnreadNetwork network;
  int known = 1;
  const auto has_reached = [&](int rank, std::uint64_t) { return rank < known; };
  ArrivalGossip gossip(network, 1, {3, 5, 7}, {has_reached, [](int, std::uint64_t) {}});
  gossip.start();
  for (std::uint64_t round = 1; round < 100; ++round)
    for (known = 1; known < 40; ++known) {
      gossip.handle_arrivals();
      gossip.send(round);
    }
  EXPECT_EQ(network.sent, 3);
}

class RelayedRounds : public ::testing::TestWithParam<TransportKind> {};

GroupOptions many_hosts(TransportKind kind) {
  GroupOptions options(kind, 13);
  options.hosts = 12;
  options.communicator.timeout = 60 * kSlowness;  // what ends a wait is not this
  options.time_limit = 50 * kSlowness;
  return options;
}

// Staging memory of several ranks in one message, in one each, and without any, of a different length on all.
TEST_P(RelayedRounds, BringStagingMemoryOfAnyLength) {
  RankGroup group(many_hosts(GetParam()));
  group.run([](Communicator& communicator) {
    const auto piece = [](std::size_t rank, std::size_t most) {
      return periodic_elements(DType::kUInt8, rank * 7919 % (most + 1), static_cast<std::uint32_t>(rank),
                               false);
    };
    for (const std::size_t most : {0, 1, 3000, 50000}) {
      const Bytes mine = piece(static_cast<std::size_t>(communicator.rank()), most);
      const Operation operation = perform(
          communicator,
          {.kind = OpKind::kAllgather, .dtype = DType::kUInt8, .rows = mine.size(), .input = mine.data()});
      Bytes all;
      for (std::size_t rank = 0; rank < 13; ++rank) {
        const Bytes theirs = piece(rank, most);
        all.insert(all.end(), theirs.begin(), theirs.end());
      }
      EXPECT_TRUE(result_of(operation) == all) << "up to " << most << " bytes";
    }
  });
}

// Ranks 3 and 8 hold up what others have published, who are not told to be late for it.
TEST_P(RelayedRounds, TellWhoIsLate) {
  GroupOptions options = many_hosts(GetParam());
  options.communicator.timeout = 2.0;
  RankGroup group(options);
  Latch told(11);
  group.run([&](Communicator& communicator) {
    run_barrier(communicator, {20.0 * kSlowness, nullptr});
    if (communicator.rank() == 3 || communicator.rank() == 8) return told.wait();
    const Error error = error_of(ErrorKind::kTimeout, [&] { run_barrier(communicator); });
    const auto named = [&](const char* text) {
      return std::string(error.what()).find(text) != std::string::npos;
    };
    // Of what comes through 3 alone, 8 is the only one that nobody knows of; and the other way.
    EXPECT_TRUE(named("for ranks 3, 8; ") || named("for rank 3 (nothing is known of rank 8, ") ||
                named("for rank 8 (nothing is known of rank 3, "))
        << error.what();
    expect_text(error, "; ranks 0-2, 4-7, 9-12 came and waited as well");
    told.count_down();
  });
}

/// A round that `late` come to only when all others know that they are late, and nobody else: however long
/// that takes, and the ranks that were late before.
void expect_named(Transport& transport, std::uint64_t round, const std::set<int>& late, Latch& named) {
  if (late.contains(transport.rank())) named.wait();
  transport.arrive(round, 0);
  const Deadline deadline = Deadline::after(20 * kSlowness);
  for (bool exact = late.contains(transport.rank()); !exact;) {
    WaitOptions waiting;
    waiting.deadline = Deadline::after(0.05);
    ASSERT_EQ(transport.await_all(round, waiting).outcome, WaitResult::Outcome::kTimeout);
    const Stragglers stragglers = transport.stragglers(round);
    std::set<int> all(stragglers.late.begin(), stragglers.late.end());
    all.insert(stragglers.unknown.begin(), stragglers.unknown.end());
    EXPECT_TRUE(std::ranges::includes(all, late));
    EXPECT_FALSE(stragglers.late.empty());
    exact = all == late;
    ASSERT_FALSE(!exact && deadline.expired()) << "rank " << transport.rank() << " names others, too";
  }
  if (!late.contains(transport.rank())) named.count_down();
  ASSERT_TRUE(transport.await_all(round, {}).ok());
}

/// Rounds of a group in which some are late: the first ranks mostly, then others.
void expect_all_named(const GroupOptions& options) {
  RankGroup group(options);
  std::vector<std::set<int>> late;
  for (int round = 0; round < 8; ++round) late.push_back({0, (7 * round + 1) % options.size});
  for (int rank = 1; rank < options.size; rank += 4) late.push_back({rank});
  late.push_back({2, 5, 9});
  std::deque<Latch> named;
  for (const std::set<int>& each : late) named.emplace_back(options.size - static_cast<int>(each.size()));
  group.run_transports([&](const std::shared_ptr<Transport>& transport) {
    for (std::size_t index = 0; index < late.size(); ++index)
      ASSERT_NO_FATAL_FAILURE(expect_named(*transport, index + 1, late[index], named[index]));
  });
}

TEST_P(RelayedRounds, NameExactlyThoseWhoAreLate) { expect_all_named(many_hosts(GetParam())); }

// Ranks whose own part of a round is done have to pass on what is told.
TEST_P(RelayedRounds, NameThoseWhoAreLateAmongUnevenHosts) {
  GroupOptions options = many_hosts(GetParam());
  options.layout = {3, 1, 1, 2, 1, 1, 4, 1, 2};
  options.size = 16;
  expect_all_named(options);
}

// Of others nobody can say that they are alive.
TEST_P(RelayedRounds, WatchThoseTheyReceiveFrom) {
  RankGroup group(many_hosts(GetParam()));
  group.run_transports([](const std::shared_ptr<Transport>& transport) {
    const int host = transport->host_number(transport->rank());
    for (int rank = 0; rank < 12; ++rank) {  // 12 shares a host with 0
      const int distance = (transport->host_number(rank) - host + 12) % 12;
      const bool receives = std::set{4, 8, 9, 10, 11}.contains(distance);
      EXPECT_EQ(transport->is_watched(rank), receives || distance == 0) << transport->rank() << " " << rank;
    }
  });
}

// Rank 3 comes, and then passes on nothing of what others have published. Some get all of it from elsewhere.
TEST_P(RelayedRounds, TellWhoHasStopped) {
  GroupOptions options = many_hosts(GetParam());
  RankGroup group(options);
  Latch connected(13);
  Latch told(12);
  std::atomic<int> held_up{0};
  group.run_transports([&](const std::shared_ptr<Transport>& transport) {
    Exchange exchange(*transport, "world");
    const Descriptor descriptor = barrier_operation().descriptor;
    exchange.begin(descriptor);
    connected.count_down();  // or a rank that is still connecting would be the one that is late
    connected.wait();
    if (transport->rank() == 3) {
      transport->arrive(exchange.round(), 0);
      return told.wait();
    }
    OperationCall call{descriptor, {}};
    call.waiting.deadline = Deadline::after(kSlowness > 1 ? 5.0 : 1.5);  // for all others to come
    try {
      exchange.synchronise(call);
    } catch (const Error& error) {
      ++held_up;
      expect_kind(error, ErrorKind::kTimeout);
      // Those that 3 has sent its own part tell that it has come only if they wait themselves, for a while.
      const std::string text = error.what();
      EXPECT_TRUE(text.find(" s for rank 3") != std::string::npos ||
                  text.find(" s: rank 3 has come, but not what others have sent") != std::string::npos)
          << text;
      EXPECT_EQ(error.context().peer, 3);
    }
    told.count_down();
  });
  EXPECT_GT(held_up, 0);
}

TEST_P(RelayedRounds, WarnOfThoseWhoAreLate) {
  GroupOptions options = many_hosts(GetParam());
  Warnings warnings(options.communicator, 0.5);
  RankGroup group(options);
  group.run([&](Communicator& communicator) {
    if (communicator.rank() == 11) warnings.await_first();
    run_barrier(communicator);
  });
  ASSERT_EQ(warnings.texts.size(), 1U);  // one of those that wait speaks for all
  const std::string& text = warnings.texts[0];
  EXPECT_TRUE(text.starts_with("rank 0 on ")) << text;
  expect_text(text, "for rank 11; rank 11 (process ");
}

TEST_P(RelayedRounds, ALostRankReachesAll) {
  RankGroup group(many_hosts(GetParam()));
  auto ends = group.outcomes([](Communicator& communicator) {
    run_barrier(communicator);
    if (communicator.rank() == 5) return communicator.close();
    run_barrier(communicator);
  });
  ends.erase(ends.begin() + 5);
  expect_all_raised(ends, ErrorKind::kPeerLost, "lost rank 5 on host5");
}

INSTANTIATE_TEST_SUITE_P(Transports, RelayedRounds,
                         ::testing::Values(TransportKind::kCluster, TransportKind::kClusterMpi), kPrinted);

}  // namespace
}  // namespace multiring
