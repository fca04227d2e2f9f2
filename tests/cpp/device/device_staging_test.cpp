// Copies between devices and pinned memory: what they wait for, and what becomes of the memory.

#include <optional>

#include "device/staging.h"
#include "support/errors.h"
#include "support/fake_gpu.h"

namespace multiring {
namespace {

using namespace testing;

class DeviceStagingTest : public ::testing::Test {
 protected:
  static constexpr std::size_t kBytes = 100;

  Buffer array(int device, std::uintptr_t stream, std::size_t bytes = kBytes) {
    return {gpu_.allocate(device, bytes), bytes, MemoryKind::kDevice, device, stream};
  }
  /// A kernel that fills an array.
  void fill(const Buffer& array, char value) {
    gpu_.launch(array.stream,
                [this, array, value] { std::memset(gpu_.view(array.address), value, array.bytes); });
  }
  char first(const Buffer& array) { return static_cast<char>(*gpu_.view(array.address)); }
  static void await(Staging& staging) {
    while (!staging.arrived()) continue;
  }

  FakeGpu gpu_;
  std::shared_ptr<Devices> devices_ = std::make_shared<Devices>(gpu_.driver());
  std::uintptr_t stream_ = gpu_.make_stream(0);
};

TEST_F(DeviceStagingTest, CopyComesAfterTheWorkThatTheStreamHas) {
  const Buffer x = array(0, stream_);
  fill(x, 'a');
  Staging staging(devices_);
  std::byte* const memory = staging.reserve(x);
  staging.copy_to_host(x, memory);
  staging.start();
  EXPECT_FALSE(staging.arrived());
  await(staging);
  EXPECT_EQ(static_cast<char>(memory[0]), 'a');
  EXPECT_EQ(static_cast<char>(memory[kBytes - 1]), 'a');
}

TEST_F(DeviceStagingTest, CopyDoesNotWaitForLaterWork) {
  const Buffer x = array(0, stream_);
  fill(x, 'a');
  Staging staging(devices_);
  staging.copy_to_host(x, staging.reserve(x));
  staging.start();
  bool ran = false;
  gpu_.launch(stream_, [&] { ran = true; });
  await(staging);
  EXPECT_FALSE(ran);
}

TEST_F(DeviceStagingTest, EachStreamIsWaitedForOnce) {
  const std::uintptr_t other = gpu_.make_stream(0);
  const Buffer arrays[] = {array(0, stream_), array(0, other), array(0, stream_), array(0, other)};
  fill(arrays[2], 'c');
  fill(arrays[3], 'd');
  Staging staging(devices_);
  std::vector<std::byte*> memory;
  for (const Buffer& each : arrays) staging.copy_to_host(each, memory.emplace_back(staging.reserve(each)));
  staging.start();
  await(staging);
  EXPECT_EQ(static_cast<char>(memory[2][0]), 'c');
  EXPECT_EQ(static_cast<char>(memory[3][0]), 'd');
  EXPECT_EQ(gpu_.calls("event_record"), 3);  // two streams, and the copies
}

// Memory of an output may be in use by work of its stream, though nothing of it is read.
TEST_F(DeviceStagingTest, CopyBackComesAfterTheWorkThatTheStreamHad) {
  const Buffer out = array(0, stream_);
  fill(out, 'x');
  Staging staging(devices_);
  std::byte* const memory = staging.reserve(out);
  staging.start();
  std::memset(memory, 'r', kBytes);
  staging.copy_back(out, memory, kBytes);
  staging.finish();
  EXPECT_EQ(first(out), 'r');
  gpu_.synchronize(stream_);
  EXPECT_EQ(first(out), 'r');
}

TEST_F(DeviceStagingTest, SeveralDevices) {
  const Buffer x = array(0, stream_);
  const Buffer y = array(1, gpu_.make_stream(1));
  fill(x, 'a');
  fill(y, 'b');
  Staging staging(devices_);
  std::byte* const from_x = staging.reserve(x);
  std::byte* const from_y = staging.reserve(y);
  staging.copy_to_host(x, from_x);
  staging.copy_to_host(y, from_y);
  staging.start();
  await(staging);
  staging.copy_back(x, from_y, kBytes);
  staging.copy_back(y, from_x, kBytes);
  staging.finish();
  EXPECT_EQ(first(x), 'b');
  EXPECT_EQ(first(y), 'a');
}

TEST_F(DeviceStagingTest, PinnedMemoryIsUsedAgain) {
  const Buffer x = array(0, stream_);
  for (int repeat = 0; repeat < 5; ++repeat) {
    Staging staging(devices_);
    staging.copy_to_host(x, staging.reserve(x));
    staging.start();
    await(staging);
  }
  EXPECT_EQ(gpu_.pinned(), 1U);
  EXPECT_EQ(gpu_.calls("event_create"), 2);
}

// The operation is given up, the copy is still to come: another one must not get the memory.
TEST_F(DeviceStagingTest, MemoryOfACopyUnderWayIsKept) {
  const Buffer x = array(0, stream_);
  fill(x, 'a');
  gpu_.set_lateness(1000);
  {
    Staging staging(devices_);
    staging.copy_to_host(x, staging.reserve(x));
    staging.start();
  }
  {
    Staging staging(devices_);
    staging.reserve(x);
    EXPECT_EQ(gpu_.pinned(), 2U);
  }
  gpu_.synchronize(stream_);
  gpu_.set_lateness(0);
  for (int query = 0; query <= 1000; ++query) devices_->pinned(0, 1);
  Staging staging(devices_);
  staging.reserve(x);
  staging.reserve(x);
  EXPECT_EQ(gpu_.pinned(), 2U);
}

TEST_F(DeviceStagingTest, TooMuchIdleMemoryIsFreed) {
  const std::size_t half = Devices::kMaxIdleBytes / 2;
  {
    const auto a = devices_->pinned(0, half), b = devices_->pinned(0, half), c = devices_->pinned(0, half);
  }
  EXPECT_EQ(gpu_.pinned(), 2U);
}

TEST_F(DeviceStagingTest, DeviceMemoryIsFreed) {
  const std::size_t before = gpu_.device_blocks();
  {
    const auto memory = devices_->device_memory(1, 100);
    EXPECT_EQ(gpu_.device_blocks(), before + 1);
    Buffer found{.address = memory.get()};
    devices_->locate(found);
    EXPECT_EQ(found.kind, MemoryKind::kDevice);
    EXPECT_EQ(found.device, 1);
  }
  EXPECT_EQ(gpu_.device_blocks(), before);
  char on_host = 0;
  Buffer found{.address = reinterpret_cast<std::byte*>(&on_host), .kind = MemoryKind::kDevice};
  devices_->locate(found);
  EXPECT_EQ(found.kind, MemoryKind::kHost);
}

TEST_F(DeviceStagingTest, CapturedStreamIsRefused) {
  const Buffer x = array(0, stream_);
  gpu_.set_capturing(stream_, true);
  Staging staging(devices_);
  expect_usage([&] { staging.reserve(x); }, "device 0 is being captured into a graph");
  EXPECT_EQ(gpu_.calls("event_record"), 0);
}

// Whatever fails is named, and what comes after is as if it had not been.
TEST_F(DeviceStagingTest, IdleMemoryIsFreedBeforePinningFails) {
  const Buffer x = array(0, stream_);
  Staging(devices_).reserve(x);
  EXPECT_EQ(gpu_.pinned(), 1u) << "it is idle now";
  Buffer larger = x;
  larger.bytes = 1 << 20;
  gpu_.fail_next("host_alloc", cuda::kOutOfMemory);
  Staging(devices_).reserve(larger);
  EXPECT_EQ(gpu_.calls("host_free"), 1);
  EXPECT_EQ(gpu_.pinned(), 1u);
  gpu_.fail_next("host_alloc", cuda::kInvalidValue);
  larger.bytes = 3 << 20;
  error_of(
      ErrorKind::kInternal, [&] { Staging(devices_).reserve(larger); },
      "cuMemHostAlloc of 3145728 bytes of pinned host memory failed");
}

TEST_F(DeviceStagingTest, FailuresAreNamed) {
  const std::pair<const char*, const char*> kFailing[] = {
      {"primary_context_retain", "cuDevicePrimaryCtxRetain on device 0"},
      {"stream_create", "cuStreamCreate on device 0"},
      {"stream_is_capturing", "cuStreamIsCapturing on device 0"},
      {"event_create", "cuEventCreate on device 0"},
      {"event_record", "cuEventRecord on device 0"},
      {"stream_wait_event", "cuStreamWaitEvent on device 0"},
      {"copy_to_host", "cuMemcpyDtoHAsync on device 0 of 100 bytes"},
      {"event_query", "the work before the operation on device 0"},
      {"copy_to_device", "cuMemcpyHtoDAsync on device 0 of 100 bytes"},
      {"event_synchronize", "the copy to the device on device 0"},
  };
  const Buffer x = array(0, stream_);
  const auto there_and_back = [&] {
    Staging staging(devices_);
    std::byte* const memory = staging.reserve(x);
    staging.copy_to_host(x, memory);
    staging.start();
    await(staging);
    memory[0] = std::byte{'z'};
    staging.copy_back(x, memory, kBytes);
    staging.finish();
  };
  for (const auto& [function, text] : kFailing) {
    devices_ = std::make_shared<Devices>(gpu_.driver());
    gpu_.fail_next(function, cuda::kOutOfMemory);
    error_of(ErrorKind::kInternal, there_and_back, text,
             "failed: CUDA_ERROR_OUT_OF_MEMORY (2: as injected), driver 13.0. Free memory");
    fill(x, 'a');
    there_and_back();
    EXPECT_EQ(first(x), 'z') << function;
  }
  devices_ = std::make_shared<Devices>(gpu_.driver());
  gpu_.fail_next("event_query", cuda::kIllegalAddress);
  error_of(ErrorKind::kInternal, there_and_back, "CUDA_ERROR_ILLEGAL_ADDRESS (700", "CUDA_LAUNCH_BLOCKING=1");
}

}  // namespace
}  // namespace multiring
