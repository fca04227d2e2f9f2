// Collectives on arrays of devices are right in every order that their waits and events allow, and none of
// those can be left out.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support/device_array.h"
#include "support/errors.h"

namespace multiring {
namespace {

using namespace testing;

constexpr std::size_t kLargeStaging = std::size_t{1} << 20;

/// Two ranks of which the first has its arrays on a device, so that all calls of the driver are its own.
struct Job {
  FakeGpu gpu;
  std::shared_ptr<Devices> devices = std::make_shared<Devices>(gpu.driver());
  RankGroup group;

  explicit Job(std::size_t staging) : group({TransportKind::kInproc, 2, staging}) {}
  DeviceArray array(std::size_t count, float value) { return {gpu, 0, std::vector<float>(count, value)}; }
};

/// What a rank does, and whether what has come out is right.
struct Scenario {
  const char* name;
  bool (*on_device)(Job& job, Communicator& communicator);
  bool (*on_host)(Communicator& communicator);
  std::size_t staging = kSmallStaging;
};
void PrintTo(const Scenario& scenario, std::ostream* out) { *out << scenario.name; }

constexpr std::size_t kCount = 3000;
std::vector<float> filled(float value, std::size_t count = kCount) {
  return std::vector<float>(count, value);
}

// Kernels that come before make the input, and are still to write what the result replaces.
bool sum_elsewhere(Job& job, Communicator& communicator) {
  const DeviceArray x = job.array(kCount, 1);
  const DeviceArray out = job.array(kCount, -1);
  run(communicator, allreduce_of(x, out, job.devices));
  return out.seen() == filled(3) && x.seen() == filled(1);
}
template <std::size_t count>
bool sum_on_host(Communicator& communicator) {
  std::vector<float> x = filled(2, count);
  run(communicator, sum_in_place(x));
  return x == filled(3, count);
}

// The second one uses the events and the memory of the first.
bool asynchronous(Job& job, Communicator& communicator) {
  bool is_right = true;
  for (int repeat = 0; repeat < 2; ++repeat) {
    const DeviceArray x = job.array(kCount, 1);
    communicator.submit(allreduce_of(x, x, job.devices), 0, nullptr)->wait(Deadline::never(), {});
    is_right = x.seen() == filled(3) && is_right;
  }
  return is_right;
}
bool asynchronous_on_host(Communicator& communicator) {
  bool is_right = true;
  for (int repeat = 0; repeat < 2; ++repeat) {
    std::vector<float> x = filled(2);
    communicator.submit(sum_in_place(x), 0, nullptr)->wait(Deadline::never(), {});
    is_right = x == filled(3) && is_right;
  }
  return is_right;
}

bool two_at_once(Job& job, Communicator& communicator) {
  const DeviceArray x = job.array(kCount, 1);
  const DeviceArray y = job.array(kCount, 1);
  const auto first = communicator.submit(allreduce_of(x, x, job.devices), 0, nullptr);
  const auto second = communicator.submit(allreduce_of(y, y, job.devices), 0, nullptr);
  second->wait(Deadline::never(), {});
  const bool is_second_right = y.seen() == filled(3);
  first->wait(Deadline::never(), {});
  return is_second_right && x.seen() == filled(3);
}
bool two_on_host(Communicator& communicator) {
  std::vector<float> x = filled(2);
  std::vector<float> y = filled(2);
  const auto first = communicator.submit(sum_in_place(x), 0, nullptr);
  communicator.submit(sum_in_place(y), 0, nullptr)->wait(Deadline::never(), {});
  first->wait(Deadline::never(), {});
  return x == filled(3) && y == filled(3);
}

// From 8 MiB on, part by part.
constexpr std::size_t kLarge = Staging::kPartsFrom / sizeof(float) + 1001;
bool large_sum(Job& job, Communicator& communicator) {
  const DeviceArray x = job.array(kLarge, 1);
  run(communicator, allreduce_of(x, x, job.devices));
  return x.seen() == filled(3, kLarge);
}

bool pieces(Job& job, Communicator& communicator) {
  const DeviceArray x = job.array(kCount - 10, 1);
  const DeviceArray y = job.array(10, 1);
  run(communicator, allreduce_of_pieces({x.buffer(), y.buffer()}, job.devices));
  return x.seen() == filled(3, kCount - 10) && y.seen() == filled(3, 10);
}

bool gathered(Job& job, Communicator& communicator) {
  const DeviceArray x = job.array(kCount, 1);
  Operation operation =
      on_devices(make_operation({.kind = OpKind::kAllgather, .rows = kCount}), job.devices, &x, nullptr);
  communicator.run(operation, {});
  // The consumer is on another stream, which the host gives the result to when the call has returned.
  std::vector<float> seen(2 * kCount);
  const auto* const result = reinterpret_cast<const float*>(job.gpu.view(operation.result.data()));
  job.gpu.launch(x.buffer().stream, [&] { seen.assign(result, result + seen.size()); });
  job.gpu.synchronize(x.buffer().stream);
  std::vector<float> wanted = filled(1);
  wanted.insert(wanted.end(), kCount, 2);
  return seen == wanted;
}
bool gathered_on_host(Communicator& communicator) {
  const std::vector<float> x = filled(2);
  Operation operation = make_operation({.kind = OpKind::kAllgather, .rows = kCount, .input = x.data()});
  communicator.run(operation, {});
  return operation.result.bytes() == 2 * kCount * sizeof(float);
}

bool received_by_broadcast(Job& job, Communicator& communicator) {
  const DeviceArray x = job.array(kCount, 1);
  Operation operation = on_devices(make_operation({.kind = OpKind::kBroadcast, .rows = kCount, .root = 1}),
                                   job.devices, &x, &x);
  communicator.run(operation, {});
  return x.seen() == filled(2);
}
bool broadcast_from_host(Communicator& communicator) {
  std::vector<float> x = filled(2);
  Operation operation = make_operation(
      {.kind = OpKind::kBroadcast, .rows = kCount, .input = x.data(), .output = x.data(), .root = 1});
  communicator.run(operation, {});
  return true;
}

constexpr Scenario kScenarios[] = {
    {"sum_elsewhere", sum_elsewhere, sum_on_host<kCount>},
    {"asynchronous", asynchronous, asynchronous_on_host},
    {"large_sum", large_sum, sum_on_host<kLarge>, kLargeStaging},
    {"pieces", pieces, sum_on_host<kCount>},
    {"gathered", gathered, gathered_on_host},
    {"received_by_broadcast", received_by_broadcast, broadcast_from_host},
};

class DeviceOrdersTest : public ::testing::TestWithParam<Scenario> {
 protected:
  /// Whether the scenario ends well; `prepare` may set what the driver does otherwise.
  bool is_right(Progress progress, int seed, const std::function<void(FakeGpu&)>& prepare = {}) {
    const Scenario& scenario = GetParam();
    Job job(scenario.staging);
    job.gpu.set_progress(progress, static_cast<std::uint64_t>(seed));
    if (prepare) prepare(job.gpu);
    bool is_right[2] = {};
    const auto outcomes = job.group.outcomes([&](Communicator& communicator) {
      is_right[communicator.rank()] =
          communicator.rank() == 0 ? scenario.on_device(job, communicator) : scenario.on_host(communicator);
    });
    counted_ = {job.gpu.orderings(Ordering::kWait), job.gpu.orderings(Ordering::kRecord)};
    return is_right[0] && is_right[1] && !outcomes[0] && !outcomes[1];
  }

  std::array<int, 2> counted_{};  // of the last run
};

TEST_P(DeviceOrdersTest, EveryOrderIsRight) {
  EXPECT_TRUE(is_right(Progress::kLate, 0));
  for (int seed = 0; seed < 10; ++seed) EXPECT_TRUE(is_right(Progress::kSeeded, seed)) << "seed " << seed;
  for (int seed = 0; seed < 3; ++seed) EXPECT_TRUE(is_right(Progress::kThreads, seed)) << "threads, " << seed;
}

class DeviceOrderingsTest : public DeviceOrdersTest {};

TEST_P(DeviceOrderingsTest, NoWaitAndNoEventCanBeLeftOut) {
  ASSERT_TRUE(is_right(Progress::kLate, 0));
  const std::array<int, 2> counted = counted_;
  EXPECT_GT(counted[0], 0);
  EXPECT_GT(counted[1], 1);
  for (const Ordering ordering : {Ordering::kWait, Ordering::kRecord}) {
    for (int number = 0; number < counted[static_cast<std::size_t>(ordering)]; ++number) {
      const auto leave_out = [&](FakeGpu& gpu) { gpu.ignore(ordering, number); };
      bool is_noticed = !is_right(Progress::kLate, 0, leave_out);
      for (int seed = 0; seed < 100 && !is_noticed; ++seed) {
        is_noticed = !is_right(Progress::kSeeded, seed, leave_out);
        if (is_noticed) {
          EXPECT_TRUE(is_right(Progress::kSeeded, seed)) << "with all of them, seed " << seed;
        }
      }
      EXPECT_TRUE(is_noticed) << (ordering == Ordering::kWait ? "wait " : "record ") << number << " of "
                              << counted[static_cast<std::size_t>(ordering)];
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Scenarios, DeviceOrdersTest, ::testing::ValuesIn(kScenarios), kPrinted);
INSTANTIATE_TEST_SUITE_P(Scenarios, DeviceOrderingsTest, ::testing::ValuesIn(kScenarios), kPrinted);
// Of two that run together the events of one make up for those of the other.
constexpr Scenario kTwoAtOnce{"two_at_once", two_at_once, two_on_host};
INSTANTIATE_TEST_SUITE_P(TwoAtOnce, DeviceOrdersTest, ::testing::Values(kTwoAtOnce), kPrinted);

}  // namespace
}  // namespace multiring
