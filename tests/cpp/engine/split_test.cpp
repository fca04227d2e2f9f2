// Sub-communicators: splits of splits, many at once, from several threads, and what is left of them.

#include <memory>
#include <string>
#include <vector>

#include "support/network/tcp_group.h"
#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

/// The sum over the ranks of `communicator` of `value`.
std::int64_t sum(Communicator& communicator, std::int64_t value, std::size_t count = 1,
                 CallMode mode = CallMode::kSync) {
  Array array(count, value);
  perform(communicator, sum_in_place(array), mode);
  EXPECT_EQ(array, Array(count, array[0]));
  return array[0];
}

class SplitTest : public GroupTest {};

TEST_P(SplitTest, GroupsByColorRankedByKeyThenRank) {
  group_.run([](Communicator& world) {
    const int rank = world.rank();
    const int size = world.size();
    const auto reversed = world.split(0, -rank, {});
    EXPECT_EQ(reversed->size(), size);
    EXPECT_EQ(reversed->rank(), size - 1 - rank);
    const auto same_key = world.split(7, 3, {});
    EXPECT_EQ(same_key->rank(), rank);
    const auto parity = world.split(rank % 2, rank, {});
    EXPECT_EQ(parity->size(), (size + 1 - rank % 2) / 2);
    EXPECT_EQ(parity->rank(), rank / 2);
    EXPECT_NE(parity->name().find("world/3"), std::string::npos) << parity->name();
    std::int64_t expected = 0;
    for (int peer = rank % 2; peer < size; peer += 2) expected += peer + 1;
    EXPECT_EQ(sum(*parity, rank + 1, 3000), expected);
    EXPECT_EQ(sum(*reversed, rank), size * (size - 1) / 2);
  });
}

TEST_P(SplitTest, NegativeColorIsLeftOut) {
  group_.run([](Communicator& world) {
    const auto others = world.split(world.rank() == 0 ? -1 : 4, 0, {});
    EXPECT_EQ(others == nullptr, world.rank() == 0);
    const std::int64_t count = others ? sum(*others, 1) : world.size() - 1;
    EXPECT_EQ(count, world.size() - 1);
    const auto nobody = world.split(-5, 0, {});
    EXPECT_EQ(nobody, nullptr);
    EXPECT_EQ(sum(world, 1), world.size());
  });
}

// Down to one rank, every level in use at the same time.
TEST_P(SplitTest, SplitsOfSplits) {
  group_.run([](Communicator& world) {
    std::vector<std::shared_ptr<Communicator>> levels;
    for (Communicator* current = &world; current->size() > 1; current = levels.back().get())
      levels.push_back(current->split(current->rank() * 2 / current->size(), -current->rank(), {}));
    for (int repeat = 0; repeat < 5; ++repeat) {
      for (const auto& level : levels) EXPECT_EQ(sum(*level, 1, 700, kCallModes[repeat % 2]), level->size());
      EXPECT_EQ(sum(world, 1), world.size());
    }
  });
}

TEST_P(SplitTest, SeventyAliveAtOnce) {
  group_.run([](Communicator& world) {
    std::vector<std::shared_ptr<Communicator>> all;
    for (int i = 0; i < 70; ++i) all.push_back(world.split(world.rank() % (i % 3 + 1), 0, {}));
    for (int repeat = 0; repeat < 2; ++repeat)
      for (const auto& communicator : all) EXPECT_EQ(sum(*communicator, 1), communicator->size());
    for (std::size_t i = 0; i < all.size(); i += 2) all[i].reset();
    for (std::size_t i = 1; i < all.size(); i += 2) EXPECT_EQ(sum(*all[i], 1), all[i]->size());
  });
}

TEST_P(SplitTest, EachDrivenByAThreadOfItsOwn) {
  group_.run([](Communicator& world) {
    std::vector<std::shared_ptr<Communicator>> all;
    for (int i = 0; i < 4; ++i)
      all.push_back(world.split(i == 3 ? world.rank() % 2 : 0, i % 2 ? -world.rank() : 0, {}));
    all.push_back(world.shared_from_this());
    in_threads(5, [&](int i) {
      const auto& own = all[static_cast<std::size_t>(i)];
      for (int repeat = 0; repeat < 40; ++repeat)
        EXPECT_EQ(sum(*own, i + 1, static_cast<std::size_t>(100 * i + 1), kCallModes[(repeat + i) % 2]),
                  (i + 1) * own->size());
    });
  });
}

// Several threads split communicators of their own at the same time: shared memory of one may come to
// another's thread, which has to keep it for the right one.
TEST_P(SplitTest, SplitAndAllocateFromSeveralThreadsAtOnce) {
  group_.run([](Communicator& world) {
    std::vector<std::shared_ptr<Communicator>> parents;
    for (int i = 0; i < 3; ++i) parents.push_back(world.split(0, 0, {}));
    in_threads(3, [&](int thread) {
      const auto& parent = parents[static_cast<std::size_t>(thread)];
      for (int i = 0; i < 10; ++i) {
        const auto child = parent->split(parent->rank() % 2, 0, {});
        const auto region = child->allocate_symmetric(20000, {});
        auto* array = reinterpret_cast<std::int64_t*>(region->part(child->rank()));
        std::fill(array, array + 2500, i);
        run(*child, allreduce_of(DType::kInt64, 2500, array, array));
        EXPECT_EQ(array[2499], i * child->size());
      }
    });
  });
}

TEST_P(SplitTest, LivesOnWhenItsParentIsClosedOrBroken) {
  group_.run([](Communicator& world) {
    const auto parent = world.split(0, 0, {});
    const auto child = parent->split(0, 0, {});
    const auto sibling = parent->split(0, 0, {});
    sibling->abort("this one only");
    EXPECT_TRUE(sibling->is_broken());
    EXPECT_FALSE(parent->is_broken());
    EXPECT_EQ(sum(*parent, 1), world.size());
    parent->close();
    EXPECT_EQ(sum(*child, 1, 2000), world.size());
    EXPECT_EQ(sum(*child, 1, 2000, CallMode::kAsync), world.size());
  });
}

// Who serves the store may leave once all have joined.
TEST_P(SplitTest, NothingIsAskedOfTheStoreOnceAllHaveMet) {
  group_.run([this](Communicator& world) {
    world.exchange_addresses({});
    run(world, barrier_operation());
    const std::size_t calls = group_.store_calls();
    run(world, barrier_operation());
    const auto reversed = world.split(0, -world.rank(), {});
    const auto named = world.duplicate("of the same ranks", {});
    const auto parity = world.split(world.rank() % 2, 0, {});
    for (const auto& each : {world.shared_from_this(), reversed, named, parity, parity->split(0, 0, {})})
      EXPECT_EQ(sum(*each, 1, 300'000), each->size());  // large enough for plans
    std::int64_t received = -1;
    const std::int64_t sent = world.rank();
    const int last = world.size() - 1;
    Operation sending = send_of(DType::kInt64, 1, &sent, last);
    Operation receiving = make_operation(
        {.kind = OpKind::kReceive, .dtype = DType::kInt64, .rows = 1, .output = &received, .root = 0});
    if (last > 0 && world.rank() == 0) world.send(sending, 0, {});
    if (last > 0 && world.rank() == last) world.receive(receiving, 0, {});
    EXPECT_EQ(received, last > 0 && world.rank() == last ? 0 : -1);
    run(world, barrier_operation());
    EXPECT_EQ(group_.store_calls(), calls);
  });
}

INSTANTIATE_TEST_SUITE_P(Groups, SplitTest, ::testing::ValuesIn(all_group_cases()), kPrinted);

// The descriptors of shared memory are closed as soon as it is mapped.
TEST(Leaks, SplitsAndRegionsKeepNoDescriptor) {
  RankGroup group(GroupOptions(TransportKind::kShm, 2));
  group.run([](Communicator& world) {
    // One rank counts, while nothing else opens anything.
    const auto count = [&] {
      run(world, barrier_operation());
      const int descriptors = world.rank() == 0 ? open_descriptors() : 0;
      run(world, barrier_operation());
      return descriptors;
    };
    const int before = count();
    const auto child = world.split(0, 0, {});
    const auto region = child->allocate_symmetric(10000, {});
    EXPECT_EQ(count(), before);
  });
}

}  // namespace
}  // namespace multiring
