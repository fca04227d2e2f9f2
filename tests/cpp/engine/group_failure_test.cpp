// Errors of groups: while they are made, how they call their ranks, and what is told where telling fails.

#include <memory>
#include <string>

#include "collective/exchange.h"
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
  GroupOptions options = two_hosts(GetParam(), 1000);
  options.time_limit = 20 * kSlowness;
  RankGroup group(options);
  Latch ended(3);
  group.run_transports([&](const std::shared_ptr<Transport>& transport) {
    Communicator world(transport, options.communicator);
    if (transport->rank() == 3) {
      exchange_colors(world);
      transport->abandon();  // as its kernel does when it is killed
      return ended.wait();
    }
    error_of(
        ErrorKind::kPeerLost, [&] { world.split(transport->rank() % 2, 0, {}); }, "in split", "'world'",
        "rank 3");
    ended.count_down();
  });
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
    // The others cannot make their group without this rank, which waits for one of them in an own group.
    exchange_colors(world);
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
    const Error lost = error_of(ErrorKind::kPeerLost, [&] { run_barrier(*same); });
    EXPECT_EQ(std::string(lost.what()).find("world rank"), std::string::npos) << lost.what();
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
    if (GetParam() != TransportKind::kCluster)  // on the others what a peer has published is seen at once
      expect_text(error, world.rank() == 0
                             ? "and waits for this rank in barrier of communicator 'world/2.0'"
                             : "and waits for this rank in barrier of communicator 'world/1.0'");
  });
}

// A rank that left may have done so because another one died, which has a higher number here.
TEST(LostRanks, TheDeadComeBeforeThoseThatLeft) {
  GroupOptions options(TransportKind::kInproc, 3);
  RankGroup group(options);
  Latch gone(2);
  group.run_transports([&](const std::shared_ptr<Transport>& transport) {
    if (transport->rank() == 1) transport->leave();
    if (transport->rank() == 2) group.hub().break_rank(2);
    if (transport->rank() != 0) return gone.arrive_and_wait();
    Communicator world(transport, options.communicator);
    error_of(ErrorKind::kPeerLost, [&] { run_barrier(world); }, "lost rank 2", "has died");
  });
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
