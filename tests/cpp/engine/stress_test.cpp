// Thousands of operations back to back, to shake out what the double buffering of rounds could get wrong: a
// rank that runs ahead, kinds that alternate, staging memory that is written again too early.

#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

struct StressCase {
  TransportKind transport;
  int size;
  double spin_microseconds;  // 0: waits sleep at once
};
void PrintTo(const StressCase& stress, std::ostream* out) {
  *out << transport_name(stress.transport) << '_' << stress.size
       << (stress.spin_microseconds > 0 ? "_ranks_spinning" : "_ranks_sleeping");
}

class StressTest : public ::testing::TestWithParam<StressCase> {
 protected:
  StressTest() : group_(options()) {}

  static GroupOptions options() {
    GroupOptions options(GetParam().transport, GetParam().size, kSmallStaging);
    options.spin_microseconds = GetParam().spin_microseconds;
    return options;
  }
  /// As many repeats as take a second or so.
  static int repeats(int of_two_ranks) {
    return static_cast<int>(of_two_ranks * 2 / GetParam().size / (kSlowness > 1 ? 4 : 1));
  }

  RankGroup group_;
};

/// Now and then a rank comes late, at its own times.
class Dawdler {
 public:
  explicit Dawdler(int rank) : random_(static_cast<std::uint32_t>(rank) * 97 + 1) {}
  void maybe() {
    if (random_() % 64 == 0) std::this_thread::yield();
    if (random_() % 512 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
  }

 private:
  std::mt19937 random_;
};

std::int64_t sum_of_ranks(int size) { return static_cast<std::int64_t>(size) * (size - 1) / 2; }

TEST_P(StressTest, SmallAllreducesBackToBack) {
  group_.run([&](Communicator& communicator) {
    Dawdler dawdler(communicator.rank());
    const int size = communicator.size();
    for (int i = 0; i < repeats(20000); ++i) {
      std::int64_t value = communicator.rank() + i;
      run(communicator, allreduce_of(DType::kInt64, 1, &value, &value));
      ASSERT_EQ(value, sum_of_ranks(size) + static_cast<std::int64_t>(i) * size);
      dawdler.maybe();
    }
  });
}

// The kinds in turn, in an order drawn by chance (the same on all ranks), with counts of zero to many
// segments.
TEST_P(StressTest, AlternatingKinds) {
  group_.run([&](Communicator& communicator) {
    Dawdler dawdler(communicator.rank());
    std::mt19937 random(5);
    const int size = communicator.size();
    const int rank = communicator.rank();
    const auto region = communicator.allocate_symmetric(64 * 1024, {});
    for (int i = 0; i < repeats(10000); ++i) {
      const std::uint64_t counts[] = {0, 1, 5, 64, 600, 3000};
      const std::uint64_t count = counts[random() % 6];
      const auto root = static_cast<int>(random() % static_cast<unsigned>(size));
      Array array(count, rank + i);
      const std::int64_t sum = sum_of_ranks(size) + static_cast<std::int64_t>(i) * size;
      Request request{.dtype = DType::kInt64, .rows = count, .input = array.data()};
      std::byte* const place = region->part(rank);
      switch (random() % 6) {
        case 0:
        case 1:
          request.kind = random() % 2 == 0 ? OpKind::kAllreduce : OpKind::kBroadcast;
          if (request.kind == OpKind::kBroadcast) request.root = root;
          request.output = array.data();
          perform(communicator, request);
          ASSERT_EQ(array, Array(count, request.root < 0 ? sum : root + i)) << i;
          break;
        case 2: {
          request.kind = OpKind::kAllgather;
          const Operation operation = perform(communicator, request);
          const auto* all = reinterpret_cast<const std::int64_t*>(operation.result.data());
          for (std::uint64_t at = 0; at < count * static_cast<std::uint64_t>(size); ++at)
            ASSERT_EQ(all[at], static_cast<std::int64_t>(at / count) + i) << i;
          break;
        }
        case 3: {
          request.kind = OpKind::kReduceScatter;
          const Operation operation = perform(communicator, request);
          const auto* block = reinterpret_cast<const std::int64_t*>(operation.result.data());
          for (std::size_t at = 0; at < operation.result.bytes() / 8; ++at) ASSERT_EQ(block[at], sum) << i;
          break;
        }
        case 4:
          run(communicator, barrier_operation());
          break;
        default:
          if (count > 0) std::memcpy(place, array.data(), count * 8);
          request.input = request.output = place;
          perform(communicator, request);
          if (count > 0) std::memcpy(array.data(), place, count * 8);
          ASSERT_EQ(array, Array(count, sum)) << i;
      }
      dawdler.maybe();
    }
  });
}

// Asynchronous operations of mixed sizes, submitted in bursts; the ranks are at different places of the
// burst.
TEST_P(StressTest, BurstsOfAsynchronousAllreduces) {
  group_.run([&](Communicator& communicator) {
    Dawdler dawdler(communicator.rank());
    std::mt19937 random(11);
    const int size = communicator.size();
    for (int burst = 0; burst < repeats(300); ++burst) {
      std::vector<Array> arrays(20);
      std::vector<std::shared_ptr<Work>> works;
      for (std::size_t i = 0; i < arrays.size(); ++i) {
        const std::size_t counts[] = {0, 1, 9, 100, 2000};
        arrays[i].assign(counts[random() % 5], communicator.rank() + static_cast<int>(i));
        const auto priority = static_cast<int>(random() % 3);
        works.push_back(communicator.submit(sum_in_place(arrays[i]), priority, nullptr));
        dawdler.maybe();
      }
      for (std::size_t i = 0; i < arrays.size(); ++i) {
        works[i]->wait(Deadline::never(), {});
        const std::int64_t sum = sum_of_ranks(size) + static_cast<std::int64_t>(i) * size;
        ASSERT_EQ(arrays[i], Array(arrays[i].size(), sum));
      }
    }
  });
}

std::vector<StressCase> stress_cases() {
  std::vector<StressCase> cases;
  for (const TransportKind transport : kTransports)
    for (const int size : {2, 3, 7})
      for (const double spin : {0.0, 50.0}) cases.push_back({transport, size, spin});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Groups, StressTest, ::testing::ValuesIn(stress_cases()), kPrinted);

}  // namespace
}  // namespace multiring
