// Arrays whose elements do not lie one after the other: what operations read and write of them, and when.

#include "collective/strided.h"

#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

/// A view of random extents and strides in `memory`, and the places of its elements in C order.
struct Case {
  StridedView view;
  std::vector<std::size_t> places;
};

Case random_case(std::mt19937& random, std::vector<std::int32_t>& memory) {
  Case made;
  StridedView& view = made.view;
  view.dtype = DType::kInt32;
  view.dims = static_cast<int>(random() % 4);
  std::int64_t step = 1 + static_cast<std::int64_t>(random() % 2);
  std::vector<int> order(static_cast<std::size_t>(view.dims));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  std::int64_t lowest = 0;
  for (const int dim : order) {
    const auto at = static_cast<std::size_t>(dim);
    view.shape[at] = static_cast<std::int64_t>(random() % 5);
    const bool is_reversed = random() % 4 == 0;
    view.strides[at] = (is_reversed ? -step : step) * 4;
    if (is_reversed && view.shape[at] > 0) lowest += (view.shape[at] - 1) * step;
    step *= std::max<std::int64_t>(view.shape[at], 1) + static_cast<std::int64_t>(random() % 2);
  }
  memory.assign(static_cast<std::size_t>(step) + 8, -1);
  view.data = reinterpret_cast<std::byte*>(memory.data() + lowest);
  std::vector<std::int64_t> index(static_cast<std::size_t>(view.dims), 0);
  for (std::size_t left = view.count(); left > 0; --left) {
    std::int64_t place = lowest;
    for (std::size_t dim = 0; dim < index.size(); ++dim) place += index[dim] * view.strides[dim] / 4;
    made.places.push_back(static_cast<std::size_t>(place));
    for (std::size_t dim = index.size(); dim-- > 0;) {
      if (++index[dim] < view.shape[dim]) break;
      index[dim] = 0;
    }
  }
  return made;
}

TEST(StridedView, KnowsElementsThatShareMemory) {
  StridedView view{.dtype = DType::kInt32, .dims = 2, .shape = {3, 2}, .strides = {0, 4}};
  EXPECT_TRUE(view.may_overlap_itself());
  view.strides = {4, -4};
  EXPECT_TRUE(view.may_overlap_itself());
  view.strides = {-8, 4};
  EXPECT_FALSE(view.may_overlap_itself());
  view.strides = {2, 4};
  EXPECT_TRUE(view.may_overlap_itself());
  view.shape = {1, 2};  // one step of any size
  EXPECT_FALSE(view.may_overlap_itself());
  view.shape = {0, 2};
  EXPECT_FALSE(view.may_overlap_itself());
}

TEST(StridedView, CopiesElementsInCOrder) {
  std::mt19937 random(3);
  for (int repeat = 0; repeat < 500; ++repeat) {
    std::vector<std::int32_t> memory;
    const Case made = random_case(random, memory);
    const std::size_t count = made.places.size();
    std::vector<std::int32_t> numbers(count), read(count);
    std::iota(numbers.begin(), numbers.end(), 0);
    made.view.copy_from(reinterpret_cast<const std::byte*>(numbers.data()));
    for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(memory[made.places[i]], numbers[i]);
    ASSERT_EQ(static_cast<std::size_t>(std::ranges::count(memory, -1)), memory.size() - count);
    made.view.copy_to(reinterpret_cast<std::byte*>(read.data()));
    ASSERT_EQ(read, numbers);
    ASSERT_FALSE(made.view.may_overlap_itself());
    if (count == 0) continue;
    const auto [low, high] = std::ranges::minmax(made.places);
    ASSERT_EQ(made.view.lowest(), reinterpret_cast<std::byte*>(memory.data() + low));
    ASSERT_EQ(made.view.extent(), (high - low + 1) * 4);
  }
}

TEST(StridedView, NegativesOfAllFloatingPointFormats) {
  std::vector<double> memory = {1.5, -2.0, 0.0, 4.0};
  StridedView view{.data = reinterpret_cast<std::byte*>(memory.data()),
                   .dtype = DType::kFloat64,
                   .dims = 1,
                   .shape = {2},
                   .strides = {16},
                   .is_negated = true};
  double numbers[2];
  view.copy_to(reinterpret_cast<std::byte*>(numbers));
  EXPECT_EQ(numbers[0], -1.5);
  EXPECT_TRUE(numbers[1] == 0.0 && std::signbit(numbers[1]));
  const double written[2] = {3.0, -0.5};
  view.copy_from(reinterpret_cast<const std::byte*>(written));
  EXPECT_EQ(memory, (std::vector<double>{-3.0, -2.0, 0.5, 4.0}));
  std::uint16_t half = 0x3C00;  // 1
  StridedView one{.data = reinterpret_cast<std::byte*>(&half), .dtype = DType::kFloat16, .is_negated = true};
  std::uint16_t negative;
  one.copy_to(reinterpret_cast<std::byte*>(&negative));
  EXPECT_EQ(negative, 0xBC00);
}

class StridedTest : public GroupTest {};

StridedView every_second(Array& array, std::size_t first, std::size_t count) {
  return {.data = reinterpret_cast<std::byte*>(&array[first]),
          .dtype = DType::kInt64,
          .dims = 1,
          .shape = {static_cast<std::int64_t>(count)},
          .strides = {16}};
}

// Each operation reads what the one before it has written, in small ones that would be fused.
TEST_P(StridedTest, OperationsReadAndWriteThemInTheirOrder) {
  group_.run([](Communicator& communicator) {
    const std::int64_t size = communicator.size();
    for (const auto mode : kCallModes) {
      Array array(40, 1), flat(20, 0);
      std::vector<std::shared_ptr<Work>> works;
      const auto issue = [&](StridedView from, StridedView to) {
        Operation operation = allreduce_of(DType::kInt64, 20, nullptr, nullptr);
        operation.strided = std::make_unique<StridedArrays>();
        operation.strided->inputs = {from};
        operation.strided->outputs = {to};
        if (mode == CallMode::kSync)
          communicator.run(operation, {});
        else
          works.push_back(communicator.submit(std::move(operation), 0, nullptr));
      };
      issue(every_second(array, 0, 20), every_second(array, 1, 20));
      issue(every_second(array, 1, 20), every_second(array, 1, 20));
      StridedView plain = every_second(flat, 0, 20);
      plain.strides[0] = 8;
      issue(every_second(array, 1, 20), plain);
      for (const auto& work : works) work->wait(Deadline::never(), {});
      for (std::size_t i = 0; i < array.size(); ++i) ASSERT_EQ(array[i], i % 2 == 0 ? 1 : size * size);
      ASSERT_EQ(flat, Array(20, size * size * size));
    }
  });
}

TEST_P(StridedTest, ListsOfArraysAreOneAfterTheOther) {
  group_.run([](Communicator& communicator) {
    const int size = communicator.size();
    std::vector<Array> sent, got(static_cast<std::size_t>(size), Array(6, -1));
    for (int peer = 0; peer < size; ++peer) sent.emplace_back(6, 100 * communicator.rank() + peer);
    Operation exchange =
        make_operation({.kind = OpKind::kAlltoall,
                        .dtype = DType::kInt64,
                        .rows = 3 * static_cast<std::uint64_t>(size),
                        .splits = std::vector<std::uint64_t>(static_cast<std::size_t>(size), 3)});
    exchange.strided = std::make_unique<StridedArrays>();
    for (int peer = 0; peer < size; ++peer) {
      exchange.strided->inputs.push_back(every_second(sent[static_cast<std::size_t>(peer)], 0, 3));
      exchange.strided->outputs.push_back(every_second(got[static_cast<std::size_t>(peer)], 1, 3));
    }
    communicator.run(exchange, {});
    for (int peer = 0; peer < size; ++peer) {
      const std::int64_t value = 100 * peer + communicator.rank();
      EXPECT_EQ(got[static_cast<std::size_t>(peer)], (Array{-1, value, -1, value, -1, value}));
    }
  });
}

TEST_P(StridedTest, AnExchangeThatIsNotTheExpectedOneIsAnErrorOnAllRanks) {
  if (group_.size() == 1) return;
  group_.run([](Communicator& communicator) {
    const auto size = static_cast<std::size_t>(communicator.size());
    const Array sent(size, 1);
    Operation exchange = make_operation({.kind = OpKind::kAlltoall,
                                         .dtype = DType::kInt64,
                                         .rows = size,
                                         .input = sent.data(),
                                         .splits = std::vector<std::uint64_t>(size, 1)});
    exchange.expected.assign(size, 1);
    if (communicator.rank() == 1) exchange.expected[0] = 2;
    try {
      communicator.run(exchange, {});
      run(communicator, barrier_operation());  // ranks that had all that they need learn of it here
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      if (communicator.rank() == 1) {
        EXPECT_EQ(error.kind(), ErrorKind::kMismatch);
        EXPECT_EQ(error.context().peer, 0);
      }
      EXPECT_NE(std::string(error.what()).find("where it expects"), std::string::npos) << error.what();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Groups, StridedTest, ::testing::ValuesIn(all_group_cases()), kPrinted);

}  // namespace
}  // namespace multiring
