// Operations of a communicator whose arrays lie on devices.

#include <memory>
#include <vector>

#include "engine/named/named_queue.h"
#include "support/device_array.h"
#include "support/errors.h"

namespace multiring {
namespace {

using namespace testing;

class DeviceArraysTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  static constexpr int kSize = 3;

  DeviceArray array(int rank, std::vector<float> values) {
    return {gpu_, rank % FakeGpu::kDevices, std::move(values)};
  }
  DeviceArraysTest() : group_({GetParam(), kSize, kSmallStaging}) {}

  Operation on_devices(Operation operation, const DeviceArray* input, const DeviceArray* output) {
    return testing::on_devices(std::move(operation), devices_, input, output);
  }
  Operation allreduce(const DeviceArray& input, const DeviceArray& output, std::string_view name = {}) {
    return allreduce_of(input, output, devices_, name);
  }
  Operation collective(OpKind kind, const DeviceArray* input, std::size_t rows, int root = -1) {
    return on_devices(make_operation({.kind = kind, .rows = rows, .root = root}), input, nullptr);
  }
  /// What a collective has allocated, which has to lie on the device of the input.
  std::vector<float> result_of(const Operation& operation) {
    const Buffer& buffer = operation.result.buffer();
    EXPECT_EQ(buffer.kind, MemoryKind::kDevice);
    EXPECT_EQ(buffer.device, operation.on_devices->input.device);
    const auto* const begin = reinterpret_cast<const float*>(gpu_.view(buffer.address));
    return {begin, begin + buffer.bytes / sizeof(float)};
  }
  static std::vector<float> filled(std::size_t count, float value) {
    return std::vector<float>(count, value);
  }

  FakeGpu gpu_;
  std::shared_ptr<Devices> devices_ = std::make_shared<Devices>(gpu_.driver());
  RankGroup group_;
};

TEST_P(DeviceArraysTest, AllreduceOfAnyCount) {
  group_.run([&](Communicator& communicator) {
    const auto mine = static_cast<float>(communicator.rank() + 1);
    for (const std::size_t count : {0, 1, 7, 1000, 100'003, 400'003}) {
      DeviceArray x = array(communicator.rank(), filled(count, mine));
      const DeviceArray out = array(communicator.rank(), filled(count, -1));
      run(communicator, allreduce(x, out));
      EXPECT_EQ(x.values(), filled(count, mine));
      EXPECT_EQ(out.values(), filled(count, 6));
      run(communicator, allreduce(x, x));
      EXPECT_EQ(x.values(), filled(count, 6));
      x.set(filled(count, 2 * mine));  // seen, though it has not run
      run(communicator, allreduce(x, x));
      EXPECT_EQ(x.values(), filled(count, 12));
    }
  });
}

// Large arrays are copied in parts, while the ranks add others.
TEST_P(DeviceArraysTest, PartsAreCopiedWhileOthersAreAdded) {
  constexpr std::size_t kCount = 2'100'003;
  group_.run([&](Communicator& communicator) {
    const DeviceArray x = array(communicator.rank(), filled(kCount, 1));
    std::vector<float> on_host = filled(kCount, 1);
    const bool is_on_host = communicator.rank() == 2;
    run(communicator, is_on_host ? sum_in_place(on_host) : allreduce(x, x));
    EXPECT_EQ(is_on_host ? on_host : x.values(), filled(kCount, 3));
    const auto work = communicator.submit(allreduce(x, x), 0, nullptr);
    work->wait(Deadline::never(), {});
    EXPECT_EQ(x.values(), filled(kCount, 7));  // 3, 3 and 1
  });
  const std::size_t bytes = kCount * sizeof(float);
  const std::size_t parts = (bytes + Staging::part_bytes(bytes) - 1) / Staging::part_bytes(bytes);
  EXPECT_EQ(gpu_.calls("copy_to_host"), static_cast<int>(5 * parts));
  if (GetParam() == TransportKind::kInproc)
    EXPECT_GT(gpu_.calls("copy_to_device"), 5);
  else
    EXPECT_EQ(gpu_.calls("copy_to_device"), 5);  // hosts exchange messages of the whole array
}

TEST_P(DeviceArraysTest, ManyInFlightTogetherAndAlone) {
  group_.run([&](Communicator& communicator) {
    std::vector<std::unique_ptr<DeviceArray>> arrays;
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < 60; ++i) {
      arrays.push_back(std::make_unique<DeviceArray>(
          array(communicator.rank(), filled(i % 4 == 3 ? 30'000 : 10, static_cast<float>(i)))));
      works.push_back(communicator.submit(allreduce(*arrays.back(), *arrays.back()), i % 3, nullptr));
    }
    for (std::size_t i = works.size(); i-- > 0;) {
      works[i]->wait(Deadline::never(), {});
      EXPECT_EQ(arrays[i]->values(), filled(arrays[i]->values().size(), static_cast<float>(kSize * i)));
    }
  });
}

TEST_P(DeviceArraysTest, ResultsThatTheCollectiveAllocates) {
  group_.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const DeviceArray x = array(rank, {static_cast<float>(rank), 10, 20});
    for (const CallMode mode : {CallMode::kSync, CallMode::kAsync}) {
      Operation gathered = collective(OpKind::kAllgather, &x, 3);
      perform(communicator, gathered, mode);
      EXPECT_EQ(result_of(gathered), (std::vector<float>{0, 10, 20, 1, 10, 20, 2, 10, 20}));
      Operation reduced = collective(OpKind::kReduceScatter, &x, 3);
      perform(communicator, reduced, mode);
      EXPECT_EQ(result_of(reduced), std::vector<float>{rank == 0 ? 3.0F : rank == 1 ? 30.0F : 60.0F});
      Operation exchanged = collective(OpKind::kAlltoall, &x, 3);
      exchanged.splits = {1, 1, 1};
      perform(communicator, exchanged, mode);
      const float own[] = {static_cast<float>(rank), 10, 20};
      EXPECT_EQ(result_of(exchanged), rank == 0 ? std::vector<float>({0, 1, 2}) : filled(3, own[rank]));
      Operation at_root = collective(OpKind::kGather, &x, 3, 1);
      perform(communicator, at_root, mode);
      EXPECT_TRUE(rank != 1 || result_of(at_root).size() == 9);
      Operation scattered = rank == 2 ? collective(OpKind::kScatter, &x, 3, 2)
                                      : make_operation({.kind = OpKind::kScatter, .root = 2});
      perform(communicator, scattered, mode);
      EXPECT_TRUE(rank != 2 || result_of(scattered) == std::vector<float>{20});
    }
  });
}

TEST_P(DeviceArraysTest, BroadcastReadsTheRootOnly) {
  group_.run([&](Communicator& communicator) {
    DeviceArray x = array(communicator.rank(), filled(500, static_cast<float>(communicator.rank())));
    Operation operation =
        on_devices(make_operation({.kind = OpKind::kBroadcast, .rows = 500, .root = 1}), &x, &x);
    communicator.run(operation, {});
    EXPECT_EQ(x.values(), filled(500, 1));
  });
  EXPECT_EQ(gpu_.calls("copy_to_host"), 1);
  EXPECT_EQ(gpu_.calls("copy_to_device"), kSize - 1);
}

TEST_P(DeviceArraysTest, Messages) {
  group_.run([&](Communicator& communicator) {
    DeviceArray x = array(communicator.rank(), filled(50'000, static_cast<float>(communicator.rank())));
    if (communicator.rank() == 0) {
      Operation sent = on_devices(send_of(DType::kFloat32, 50'000, nullptr, 1), &x, nullptr);
      communicator.send(sent, 7, {});
    } else if (communicator.rank() == 1) {
      Operation received =
          on_devices(make_operation({.kind = OpKind::kReceive, .rows = 50'000, .root = 0}), nullptr, &x);
      communicator.receive(received, 7, {});
      EXPECT_EQ(x.values(), filled(50'000, 0));
    }
  });
}

TEST_P(DeviceArraysTest, PiecesOnDevicesAndOnTheHost) {
  group_.run([&](Communicator& communicator) {
    const auto mine = static_cast<float>(communicator.rank());
    const DeviceArray first = array(communicator.rank(), filled(3, mine));
    std::vector<float> second = filled(1000, mine);
    const DeviceArray third = array(communicator.rank(), filled(70, mine));
    const Buffer on_host{reinterpret_cast<std::byte*>(second.data()), second.size() * sizeof(float)};
    const auto work = communicator.submit(
        allreduce_of_pieces({first.buffer(), on_host, third.buffer()}, devices_), 0, nullptr);
    work->wait(Deadline::never(), {});
    EXPECT_EQ(first.values(), filled(3, 3));
    EXPECT_EQ(second, filled(1000, 3));
    EXPECT_EQ(third.values(), filled(70, 3));
  });
}

TEST_P(DeviceArraysTest, HostOnOneRankDeviceOnOthers) {
  group_.run([&](Communicator& communicator) {
    std::vector<float> on_host = filled(20'000, 1);
    const DeviceArray x = array(communicator.rank(), filled(20'000, 2));
    run(communicator, communicator.rank() == 0 ? sum_in_place(on_host) : allreduce(x, x));
    EXPECT_EQ(communicator.rank() == 0 ? on_host : x.values(), filled(20'000, 5));
  });
}

TEST_P(DeviceArraysTest, NamedQueue) {
  group_.run([&](Communicator& communicator) {
    const auto queue = NamedQueue::create(communicator, "queue", {});
    const DeviceArray x = array(communicator.rank(), filled(100, 1));
    NamedRequest request;
    request.name = "x";
    request.operations.push_back(allreduce(x, x));
    queue->submit(std::move(request)).front()->wait(Deadline::never(), {});
    EXPECT_EQ(x.values(), filled(100, 3));
  });
}

// Operations that run together have more bytes than each: no copy back may reach beyond its array.
TEST_P(DeviceArraysTest, TogetherEachKeepsToItsArray) {
  const auto values = [](std::size_t count, int first) {
    std::vector<float> made(count);
    for (std::size_t i = 0; i < count; ++i) made[i] = static_cast<float>(first + static_cast<int>(i % 1000));
    return made;
  };
  group_.run([&](Communicator& communicator) {
    const auto queue = NamedQueue::create(communicator, "queue", {});
    std::vector<std::unique_ptr<DeviceArray>> arrays;  // every other one is between those that are reduced
    NamedRequest request;
    request.name = "x";
    for (int i = 0; i < 6; ++i) {
      arrays.push_back(std::make_unique<DeviceArray>(array(communicator.rank(), values(100'003, i))));
      gpu_.synchronize(arrays.back()->buffer().stream);
      if (i % 2 == 0) request.operations.push_back(allreduce(*arrays.back(), *arrays.back()));
    }
    for (const auto& work : queue->submit(std::move(request))) work->wait(Deadline::never(), {});
    for (int i = 0; i < 6; ++i) {
      std::vector<float> expected = values(100'003, i);
      if (i % 2 == 0)
        for (float& value : expected) value *= 3;
      EXPECT_EQ(arrays[static_cast<std::size_t>(i)]->values(), expected) << i;
    }
  });
}

// What is written to the array of a busy stream would wait for it as long.
TEST_P(DeviceArraysTest, ABroadcastWaitsForTheDeviceWithADeadline) {
  const auto outcomes = group_.outcomes([&](Communicator& communicator) {
    const DeviceArray x = array(communicator.rank(), filled(100, 1));
    if (communicator.rank() == 1) gpu_.launch(x.buffer().stream, {}, false);
    Operation operation =
        on_devices(make_operation({.kind = OpKind::kBroadcast, .rows = 100, .root = 0}), &x, &x);
    communicator.run(operation, {communicator.rank() == 1 ? 0.1 : -1.0, nullptr});
  });
  ASSERT_TRUE(outcomes[1].has_value()) << "though it reads nothing of its array";
  expect_kind(*outcomes[1], ErrorKind::kTimeout);
}

// A device that fails is the first error of all ranks, and says where.
TEST_P(DeviceArraysTest, FailureReachesAllRanks) {
  for (const char* function : {"copy_to_host", "event_query", "copy_to_device"}) {
    devices_ = std::make_shared<Devices>(gpu_.driver());  // which keeps nothing of the last one
    const auto outcomes = group_.outcomes([&](Communicator& communicator) {
      std::vector<float> on_host = filled(100, 1);
      if (communicator.rank() != 0) {
        run(communicator, sum_in_place(on_host, "x"));
        return run_barrier(communicator);
      }
      const DeviceArray x = array(0, on_host);
      gpu_.fail_next(function, cuda::kIllegalAddress);
      run(communicator, allreduce(x, x, "x"));
    });
    ASSERT_TRUE(outcomes[0].has_value());
    expect_kind(*outcomes[0], ErrorKind::kInternal);
    expect_text(*outcomes[0], "rank 0 on ");
    expect_text(*outcomes[0], "in allreduce 'x' sum float32[100, 1] (400 bytes)");
    expect_text(*outcomes[0], "on device 0");
    EXPECT_EQ(outcomes[0]->context().operation, "allreduce");
    EXPECT_EQ(outcomes[0]->context().tensor, "x");
    for (int rank = 1; rank < kSize; ++rank) {
      ASSERT_TRUE(outcomes[static_cast<std::size_t>(rank)].has_value()) << function;
      expect_text(*outcomes[static_cast<std::size_t>(rank)], "CUDA_ERROR_ILLEGAL_ADDRESS");
    }
  }
}

TEST_P(DeviceArraysTest, KernelThatNeverEnds) {
  const auto outcomes = group_.outcomes([&](Communicator& communicator) {
    const DeviceArray x = array(communicator.rank(), filled(100, 1));
    if (communicator.rank() == 1) gpu_.launch(x.buffer().stream, {}, false);
    Operation operation = allreduce(x, x);
    communicator.run(operation, {communicator.rank() == 1 ? 0.1 : -1.0, nullptr});
  });
  ASSERT_TRUE(outcomes[1].has_value());
  expect_kind(*outcomes[1], ErrorKind::kTimeout);
  expect_text(*outcomes[1], "for the device to finish the work that makes the input");
  EXPECT_TRUE(outcomes[0].has_value());
}

// A rank that waits for its own device learns that a peer has ended it all.
TEST_P(DeviceArraysTest, PeerThatFailsWhileTheDeviceIsBusy) {
  const auto outcomes = group_.outcomes([&](Communicator& communicator) {
    const DeviceArray x = array(communicator.rank(), filled(100, 1));
    if (communicator.rank() == 2) return communicator.abort("of the program");
    gpu_.launch(x.buffer().stream, {}, false);
    run(communicator, allreduce(x, x));
  });
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(outcomes[static_cast<std::size_t>(rank)].has_value());
    expect_kind(*outcomes[static_cast<std::size_t>(rank)], ErrorKind::kAborted);
    expect_text(*outcomes[static_cast<std::size_t>(rank)], "of the program");
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, DeviceArraysTest,
                         ::testing::Values(TransportKind::kInproc, TransportKind::kCluster), kPrinted);

}  // namespace
}  // namespace multiring
