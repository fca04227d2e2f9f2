// Errors of groups: while they are made, how they call their ranks, and what is told where telling fails.

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "collective/exchange.h"
#include "engine/communicator_list.h"
#include "support/errors.h"
#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

/// What a rank does in a split before the groups are made.
void exchange_colors(Communicator& communicator) {
  const std::int64_t mine[2] = {0, 0};
  Operation operation = make_operation({.kind = OpKind::kSplit, .dtype = DType::kInt64, .rows = 1});
  operation.descriptor.key.count = 2;
  operation.descriptor.bytes = sizeof mine;
  operation.input = reinterpret_cast<const std::byte*>(mine);
  communicator.run(operation, {});
}

/// The same, and opens its part of the group of all, and tells the others where that is.
std::shared_ptr<Transport> open_group(Communicator& communicator, Transport& transport) {
  exchange_colors(communicator);
  std::vector<int> members(static_cast<std::size_t>(communicator.size()));
  std::iota(members.begin(), members.end(), 0);
  WaitOptions waiting;
  waiting.deadline = Deadline::after(20);
  auto group = transport.subgroup(members, std::uint64_t{1} << 32U, waiting);
  const std::string addresses = group->addresses();
  Operation operation = make_operation(
      {.kind = OpKind::kSplit, .dtype = DType::kUInt8, .rows = addresses.size(), .input = addresses.data()});
  operation.descriptor.key.count = 1;
  operation.descriptor.bytes = addresses.size();
  communicator.run(operation, {});
  return group;
}

/// Four ranks on two hosts, who wait for as long as it says.
GroupOptions two_hosts(TransportKind kind, double timeout) {
  GroupOptions options(kind, 4);
  options.layout = {2, 2};
  options.communicator.timeout = timeout;
  return options;
}

class GroupFailure : public ::testing::TestWithParam<TransportKind> {};

// The new group has no connection yet whose end could be seen, and the deadline is far away.
TEST_P(GroupFailure, ARankThatDiesWhileAGroupIsMadeIsLost) {
  for (const bool opens : {false, true}) {
    GroupOptions options = two_hosts(GetParam(), 1000);
    options.time_limit = 20 * kSlowness;
    RankGroup group(options);
    Latch ended(3);
    group.run_transports([&](const std::shared_ptr<Transport>& transport) {
      Communicator world(transport, options.communicator);
      if (transport->rank() == 3) {
        std::shared_ptr<Transport> opened;
        opens ? void(opened = open_group(world, *transport)) : exchange_colors(world);
        transport->abandon();  // as its kernel does when it is killed
        return ended.wait();
      }
      error_of(ErrorKind::kPeerLost, [&] { world.split(0, 0, {}); }, "in split", "'world'", "rank 3");
      ended.count_down();
    });
  }
}

TEST_P(GroupFailure, AnInterruptWhileAGroupIsMadeStopsAll) {
  struct Interrupted {};
  const GroupOptions options = two_hosts(GetParam(), 1000);
  RankGroup group(options);
  Latch split(1);
  group.run_transports([&](const std::shared_ptr<Transport>& transport) {
    Communicator world(transport, options.communicator);
    const std::function<void()> interrupt = [] { throw Interrupted(); };
    if (transport->rank() != 3) {
      error_of(ErrorKind::kAborted, [&] { world.split(0, 0, {}); }, "rank 3 on host1 was interrupted");
      return split.count_down();
    }
    // The others cannot connect their group without this rank, which waits for them.
    const auto opened = open_group(world, *transport);
    EXPECT_THROW(run_barrier(world, {-1.0, &interrupt}), Interrupted);
    split.wait();
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, GroupFailure,
                         ::testing::Values(TransportKind::kCluster, TransportKind::kClusterRelayed),
                         kPrinted);

class GroupNames : public ::testing::TestWithParam<TransportKind> {};

// Users know their ranks by the numbers of the world.
TEST_P(GroupNames, ErrorsTellTheRanksOfTheWorld) {
  RankGroup group(two_hosts(GetParam(), 20 * kSlowness));
  Latch timed_out(1);
  group.run([&](Communicator& world) {
    const auto odd = world.split(world.rank() % 2, 0, {});
    const auto same = world.split(0, 0, {});
    if (world.rank() == 1) {
      error_of(
          ErrorKind::kTimeout, [&] { run_barrier(*odd, {0.05, nullptr}); }, "rank 0 (world rank 1) on ",
          "for rank 1 (world rank 3)", "Rank 1 (world rank 3) (process ");
      timed_out.count_down();
    }
    if (world.rank() == 3) {
      timed_out.wait();
      error_of(ErrorKind::kTimeout, [&] { run_barrier(*odd); }, "rank 0 (world rank 1) stopped all ranks");
    }
    run_barrier(world);
    if (world.rank() == 3) return;
    error_of(ErrorKind::kPeerLost, [&] { run_barrier(*same); }, "lost rank 3 on ");
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, GroupNames, ::testing::ValuesIn(kTransports), kPrinted);

// Each waits in a communicator for the other, which waits in the other one.
TEST_P(GroupNames, CommunicatorsInDifferentOrderAreNamed) {
  RankGroup group(GroupOptions(GetParam(), 2));
  Latch both(2);
  group.run([&](Communicator& world) {
    const auto a = world.split(0, 0, {});
    const auto b = world.split(0, 0, {});
    const auto& first = world.rank() == 0 ? a : b;
    const Error error = error_of(ErrorKind::kTimeout, [&] { run_barrier(*first, {0.5, nullptr}); });
    both.arrive_and_wait();
    // Of a peer on another host it is only seen that it has published something.
    const std::string what = GetParam() == TransportKind::kCluster ? "an operation" : "barrier";
    expect_text(error, "and waits for this rank in " + what + " of communicator 'world/" +
                           (world.rank() == 0 ? "2.0'" : "1.0'"));
  });
}

// A rank that left may have done so because another one died, which has a higher number here.
TEST(LostRanks, TheDeadComeBeforeThoseThatLeft) {
  GroupOptions options(TransportKind::kInproc, 3);
  RankGroup group(options);
  Latch gone(3);
  group.run_transports([&](const std::shared_ptr<Transport>& transport) {
    if (transport->rank() == 1) transport->leave();
    if (transport->rank() == 2) group.hub().break_rank(2);
    gone.arrive_and_wait();
    if (transport->rank() != 0) return;
    Communicator world(transport, options.communicator);
    error_of(ErrorKind::kPeerLost, [&] { run_barrier(world); }, "lost rank 2", "has died");
  });
}

// Rank 1 leaves the pair because a rank that is no member has died. Rank 0 knows by the world, which rank 1
// has told or, where it has not, which is connected with rank 2.
TEST_P(GroupNames, WhoLeavesBecauseOfAnotherRankIsNotBlamed) {
  for (const int victim : {3, 2}) {
    const GroupOptions options = two_hosts(GetParam(), 1000);
    RankGroup group(options);
    Latch died(1), told(2);
    group.run_transports([&](const std::shared_ptr<Transport>& transport) {
      Communicator world(transport, options.communicator);
      const int rank = world.rank();
      const auto pair = world.split(rank < 2 ? 0 : -1, 0, {});
      const auto other = world.split(rank == 1 || rank == victim ? 0 : -1, 0, {});
      if (rank == victim) {
        if (GetParam() == TransportKind::kInproc) group.hub().break_rank(victim);
        world.abandon();  // as its kernel does when it is killed
        other->abandon();
        died.count_down();
      }
      if (rank >= 2) return told.wait();
      died.wait();
      if (rank == 1) {
        error_of(ErrorKind::kPeerLost, [&] { run_barrier(victim == 3 ? world : *other); }, "lost rank");
        pair->close();
      } else {
        const Error error = error_of(
            ErrorKind::kPeerLost, [&] { run_barrier(*pair); },
            "it has left, and communicator 'world' has ended: ", "rank " + std::to_string(victim));
        EXPECT_EQ(std::string(error.what()).find("fewer batches"), std::string::npos) << error.what();
      }
      told.count_down();
    });
  }
}

// A rank whose network fails while it tells of an error still ends what its own users wait for, and the other
// ranks of its host learn of it.
TEST(FailingNetworks, KeepNoPendingWorkWaiting) {
  GroupOptions options(TransportKind::kCluster, 3);
  options.layout = {2, 1};
  RankGroup group(options);
  Latch told(2);
  group.run_transports([&](const std::shared_ptr<Transport>& transport) {
    const auto world = std::make_shared<Communicator>(transport, options.communicator);
    if (transport->rank() == 2) return told.wait();  // and never comes
    float value = 1;
    const auto work = world->submit(allreduce_of(DType::kFloat32, 1, &value, &value), 0, nullptr);
    if (transport->rank() == 0) {
      group.break_networks(0);
      world->abort("as the test has it");
      EXPECT_TRUE(world->is_broken());
    }
    try {
      work->wait(Deadline::after(10), {});
      ADD_FAILURE() << "done without rank 2";
    } catch (const Error& error) {
      // The abort, or what the rank that drives the broken network met before it.
      expect_text(error, "as the test has it");
    }
    told.count_down();
  });
}

// They are broken in this order, and the process may end as soon as the last one is.
TEST(NamedCommunicators, AreFoundInTheOrderOfTheirNames) {
  GroupOptions options(TransportKind::kInproc, 1);
  RankGroup group(options);
  group.run([](Communicator& world) {
    std::vector<std::shared_ptr<Communicator>> made;
    std::vector<std::string> names;
    for (int i = 0; i < 5; ++i) {
      made.push_back(world.split(0, 0, {}));
      names.push_back(made.back()->user_name());
    }
    for (const bool backwards : {true, false}) {
      std::reverse(made.begin(), made.end());
      std::reverse(names.begin(), names.end());
      EXPECT_EQ(CommunicatorList::find(names), made) << backwards;
    }
  });
}

// Another version of the library, or memory that somebody has written into.
TEST(Garbled, WhatARankAsksForIsCheckedFirst) {
  for (const int field : {0, 1, 2}) {
    RankGroup group(GroupOptions(TransportKind::kInproc, 2));
    Latch seen(1);
    group.run_transports([&](const std::shared_ptr<Transport>& transport) {
      Communicator world(transport, GroupOptions().communicator);
      if (transport->rank() == 0) {
        error_of(ErrorKind::kInternal, [&] { run_barrier(world); }, "what rank 1 on ", "makes no sense");
        return seen.count_down();
      }
      Exchange exchange(*transport, "world");
      exchange.begin(barrier_operation().descriptor);
      auto& written = *reinterpret_cast<Descriptor*>(transport->header(1, exchange.round()));
      if (field == 0) written.dims = 200;
      if (field == 1) written.dtype = static_cast<DType>(99);
      if (field == 2) written.key.kind = static_cast<OpKind>(77);
      transport->arrive(exchange.round(), 0);
      seen.wait();
    });
  }
}

}  // namespace
}  // namespace multiring
