// Allreduces by NCCL, on the stand-ins for it and for the driver: ranks as threads, which share its table.

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "support/device_array.h"
#include "support/device_bucket.h"
#include "support/errors.h"
#include "support/nccl_folder.h"

extern "C" int ncclGroupEnd();

namespace multiring {
namespace {

using namespace testing;

class DeviceNcclTest : public ::testing::TestWithParam<std::tuple<Progress, Layout>> {
 protected:
  static constexpr std::size_t kCount = 20'001;
  // As the gradients of a model, and their flags on the host.
  static constexpr std::size_t kCounts[] = {3, kCount, 0, 1, 700};

  DeviceNcclTest() : group_(options()) { gpu_.set_progress(std::get<0>(GetParam()), 3); }

  static GroupOptions options() { return std::get<1>(GetParam()).options(); }

  static Operation in_any_order(Operation operation) {
    operation.descriptor.key.order = Order::kAny;
    return operation;
  }
  Operation allreduce(const DeviceArray& input, const DeviceArray& output) {
    return in_any_order(allreduce_of(input, output, devices_));
  }
  DeviceArray array(int device, std::size_t count, float value) {
    return {gpu_, device, std::vector<float>(count, value)};
  }
  int copies() { return gpu_.calls("copy_to_host"); }

  const NcclFolder folder_;
  FakeGpu gpu_;
  std::shared_ptr<Devices> devices_ = std::make_shared<Devices>(gpu_.driver());
  RankGroup group_;
};

TEST_P(DeviceNcclTest, SumsOfWholeArrays) {
  group_.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const DeviceArray x = array(rank, kCount, static_cast<float>(rank + 1));
    const DeviceArray out = array(rank, kCount, -1);
    for (const CallMode mode : kCallModes) {
      perform(communicator, allreduce(x, out), mode);
      EXPECT_EQ(x.seen(), std::vector<float>(kCount, static_cast<float>(rank + 1)));
      EXPECT_EQ(out.seen(), std::vector<float>(kCount, 3));
    }
  });
  EXPECT_EQ(copies(), 0);
}

// When a kernel that makes an input runs, as late as it may, NCCL's stream has been told to wait for it. Had
// the host waited the ranks would not even have agreed.
TEST_P(DeviceNcclTest, BeginsBeforeTheInputIsThere) {
  if (std::get<0>(GetParam()) != Progress::kLate) GTEST_SKIP() << "kernels may run sooner";
  group_.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const DeviceArray x = array(rank, kCount, 1);
    run(communicator, allreduce(x, x));
    const auto waits = [&] { return gpu_.calls("stream_wait_event"); };
    run(communicator, barrier_operation());
    const int before = waits();
    int at_the_kernel = 0;
    gpu_.launch(x.buffer().stream, [&] { at_the_kernel = waits(); });
    run(communicator, barrier_operation());
    run(communicator, allreduce(x, x));
    EXPECT_EQ(x.seen(), std::vector<float>(kCount, 4));
    EXPECT_GT(at_the_kernel, before);
  });
}

// Both end, the peers told who was late; what NCCL has behind that kernel stays there, and serves none again.
TEST_P(DeviceNcclTest, AKernelThatNeverEnds) {
  if (std::get<0>(GetParam()) != Progress::kLate) GTEST_SKIP() << "ends as with the others, after 5 s";
  const auto outcomes = group_.outcomes([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const DeviceArray x = array(rank, kCount, 1);
    run(communicator, allreduce(x, x));
    run(communicator, barrier_operation());
    if (rank == 1) gpu_.launch(x.buffer().stream, {}, false);
    run(communicator, allreduce(x, x), {rank == 1 ? 0.1 : -1.0, nullptr});
  });
  ASSERT_TRUE(outcomes[1].has_value());
  expect_kind(*outcomes[1], ErrorKind::kTimeout);
  expect_text(*outcomes[1], "for the device to finish the work that makes the input");
  EXPECT_TRUE(outcomes[0].has_value());
  RankGroup(options()).run([&](Communicator& communicator) {
    const DeviceArray x = array(communicator.rank(), kCount, 1);
    run(communicator, allreduce(x, x));
    EXPECT_EQ(x.seen(), std::vector<float>(kCount, 2));
  });
}

// What the program launches then may use the array's memory anew, so it comes after what NCCL may still
// write.
TEST_P(DeviceNcclTest, AnArrayAfterAFailureIsNotWrittenBehindTheProgramsBack) {
  if (std::get<0>(GetParam()) != Progress::kLate) GTEST_SKIP() << "streams get on by themselves";
  int waits = 0;
  const auto outcomes = group_.outcomes([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const DeviceArray x = array(rank, kCount, 1);
    run(communicator, allreduce(x, x));
    run(communicator, barrier_operation());
    if (rank == 0) gpu_.fail_next("event_query", cuda::kOutOfMemory);
    if (rank == 0) waits = gpu_.calls("stream_wait_event");
    run(communicator, barrier_operation());
    run(communicator, allreduce(x, x));
  });
  expect_all_raised(outcomes, ErrorKind::kInternal, "CUDA_ERROR_OUT_OF_MEMORY");
  EXPECT_EQ(gpu_.calls("stream_wait_event"), waits + 4) << "two of NCCL's streams, two of the program's";
}

// On one host nothing is rounded, so NCCL has it; among hosts NCCL would send float32.
TEST_P(DeviceNcclTest, HalfPrecisionBetweenHosts) {
  const bool one_host = std::get<1>(GetParam()).ranks.size() == 1;
  group_.run([&](Communicator& communicator) {
    const DeviceArray x = array(communicator.rank(), kCount, 257);
    Operation sum = allreduce(x, x);
    sum.descriptor.key.comm_dtype = CommDtype::kBFloat16;
    run(communicator, std::move(sum));
    EXPECT_EQ(x.seen(), std::vector<float>(kCount, one_host ? 514 : 512));
  });
  EXPECT_EQ(copies(), one_host ? 0 : 2);
}

TEST_P(DeviceNcclTest, SumsOfPieces) {
  group_.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    for (const CallMode mode : kCallModes) {
      Bucket bucket(gpu_, rank, kCounts, static_cast<float>(rank + 1));
      for (const float wanted : {3.0F, 6.0F, 12.0F}) {
        perform(communicator, bucket.operation(devices_), mode);
        bucket.expect(wanted);
      }
    }
  });
  EXPECT_EQ(copies(), 0);
}

// The ranks have other parts of the array on their devices: it passes through the host. The next one, which
// might, is copied there as well, and those that follow are not.
TEST_P(DeviceNcclTest, PiecesThatDifferPassThroughTheHost) {
  int expected = 0;
  for (const CallMode mode : kCallModes) {
    RankGroup group(options());
    group.run([&](Communicator& communicator) {
      const int rank = communicator.rank();
      Bucket differs(gpu_, rank, kCounts, static_cast<float>(rank + 1));
      const std::size_t on_host = rank == 1 ? kCounts[0] : 0;
      perform(communicator, differs.operation(devices_, on_host), mode);
      differs.expect(3, rank == 0);
      Bucket bucket(gpu_, rank, kCounts, static_cast<float>(rank + 1));
      for (const float wanted : {3.0F, 6.0F, 12.0F}) {
        perform(communicator, bucket.operation(devices_), mode);
        bucket.expect(wanted);
      }
    });
    expected += 7 + 8;  // 4 and 3 pieces that have elements, then 4 and 4
    EXPECT_EQ(copies(), expected);
  }
}

TEST_P(DeviceNcclTest, AnArrayOnTheHostOfOneRank) {
  group_.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const DeviceArray x = array(rank, kCount, 1);
    std::vector<float> on_host(kCount, 1);
    Operation sum = sum_in_place(on_host);
    run(communicator, rank == 1 ? in_any_order(std::move(sum)) : allreduce(x, x));
    EXPECT_EQ(rank == 1 ? on_host : x.seen(), std::vector<float>(kCount, 2));
    const DeviceArray y = array(rank, kCount, 1);
    for (const float wanted : {2.0F, 4.0F}) {
      run(communicator, allreduce(y, y));
      EXPECT_EQ(y.seen(), std::vector<float>(kCount, wanted));
    }
  });
  EXPECT_EQ(copies(), 2);  // of rank 0: the first, and the second, which is not used
}

TEST_P(DeviceNcclTest, ADeviceThatTwoRanksHaveHadServesThemLater) {
  group_.run([&](Communicator& communicator) {
    const DeviceArray shared = array(0, kCount, 1);
    run(communicator, allreduce(shared, shared));
    EXPECT_EQ(shared.seen(), std::vector<float>(kCount, 2));
    run(communicator, barrier_operation());
    const DeviceArray own = array(communicator.rank(), kCount, 1);
    run(communicator, allreduce(own, own));
    EXPECT_EQ(own.seen(), std::vector<float>(kCount, 2));
    const int before = copies();
    run(communicator, allreduce(own, own));
    EXPECT_EQ(own.seen(), std::vector<float>(kCount, 4));
    EXPECT_EQ(copies(), before);
  });
}

// Of more than the host adds at once: it would be copied in parts.
TEST_P(DeviceNcclTest, ALargeArrayAfterAnOfferThatWasNotTaken) {
  constexpr std::size_t kLarge = Staging::kPartsFrom / sizeof(float) + 3;
  group_.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const DeviceArray shared = array(0, kCount, 1);
    run(communicator, allreduce(shared, shared));
    const DeviceArray x = array(rank, kLarge, 1);
    for (const float wanted : {2.0F, 4.0F, 8.0F}) {
      run(communicator, allreduce(x, x));
      EXPECT_EQ(x.seen(), std::vector<float>(kLarge, wanted));
    }
  });
}

TEST_P(DeviceNcclTest, FailuresOfAnOperation) {
  ::setenv("FAKE_NCCL", "fail=operation", 1);
  const auto outcomes = group_.outcomes([&](Communicator& communicator) {
    Bucket bucket(gpu_, communicator.rank(), kCounts, 1);
    run(communicator, bucket.operation(devices_));
  });
  expect_all_raised(outcomes, ErrorKind::kInternal, "an operation of NCCL");
}

TEST_P(DeviceNcclTest, CopiesThatCannotBeMadeAreNotNeeded) {
  group_.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const DeviceArray shared = array(0, kCount, 1);
    run(communicator, allreduce(shared, shared));
    run(communicator, barrier_operation());
    const DeviceArray own = array(rank, kCount, 1);
    if (rank == 0) gpu_.fail_next("copy_to_host", cuda::kOutOfMemory);
    run(communicator, allreduce(own, own));
    EXPECT_EQ(own.seen(), std::vector<float>(kCount, 2));
  });
}

TEST_P(DeviceNcclTest, FailuresInAGroup) {
  for (const char* const failure : {"fail=enqueue", "fail=group"}) {
    RankGroup group(options());
    ::setenv("FAKE_NCCL", failure, 1);
    const auto body = [&](Communicator& communicator) {
      Bucket bucket(gpu_, communicator.rank(), kCounts, 1);
      run(communicator, bucket.operation(devices_));
      bucket.expect(2);
    };
    const auto outcomes = group.outcomes([&](Communicator& communicator) {
      try {
        body(communicator);
      } catch (const Error&) {
        EXPECT_EQ(ncclGroupEnd(), 5) << "ncclInvalidUsage: this thread has no group open";
        throw;
      }
    });
    expect_all_raised(outcomes, ErrorKind::kInternal, "failed");
    ::unsetenv("FAKE_NCCL");
    RankGroup(options()).run(body);
  }
}

TEST_P(DeviceNcclTest, IsGivenBackWhenTheCommunicatorIsClosed) {
  const auto own_files = [&](int rank) {
    int found = 0;
    for (const auto& each : std::filesystem::directory_iterator(folder_.path()))
      found += each.path().string().ends_with(".init." + std::to_string(rank)) ? 1 : 0;
    return found;
  };
  group_.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const DeviceArray x = array(rank, kCount, 1);
    run(communicator, allreduce(x, x));
    EXPECT_EQ(own_files(rank), 1);
    run(communicator, barrier_operation());
    communicator.close();
    EXPECT_EQ(own_files(rank), 0);
  });
}

TEST_P(DeviceNcclTest, FailuresToConnect) {
  ::setenv("FAKE_NCCL", "fail=init", 1);
  const auto outcomes = group_.outcomes([&](Communicator& communicator) {
    const DeviceArray x = array(communicator.rank(), kCount, 1);
    run(communicator, allreduce(x, x));
  });
  expect_all_raised(outcomes, ErrorKind::kInternal, "ncclCommInitRankConfig");
}

// One rank says so for all, which have come; none knows who is stuck.
TEST_P(DeviceNcclTest, ALongWaitToConnectIsTold) {
  ::setenv("FAKE_NCCL", "hang=init", 1);
  GroupOptions hasty = options();
  hasty.communicator.timeout = 0.5;
  hasty.communicator.stall_warning = 0.05;
  std::mutex mutex;
  std::vector<std::string> warnings;
  hasty.communicator.warn = [&](const std::string& text) {
    const std::lock_guard lock(mutex);
    if (text.find("has waited") != std::string::npos) warnings.push_back(text);
  };
  const auto outcomes = RankGroup(hasty).outcomes([&](Communicator& communicator) {
    const DeviceArray x = array(communicator.rank(), kCount, 1);
    run(communicator, allreduce(x, x));
  });
  expect_all_raised(outcomes, ErrorKind::kTimeout, "NCCL to connect the ranks");
  ASSERT_EQ(warnings.size(), 1U);
  expect_text(warnings[0], "for devices, or NCCL: all ranks have come");
}

// NCCL refuses two ranks on one device; what it has not served peer memory has, as far as it moves bytes
// (kernels need NVRTC).
TEST(DeviceNcclOrPeersTest, WhatIsRefusedIsOfferedToPeerMemory) {
  const NcclFolder folder;
  FakeGpu gpu;
  const auto devices = std::make_shared<Devices>(gpu.driver());
  GroupOptions options = Layout{{2}}.options();
  options.communicator.order = Order::kAny;
  options.communicator.peer_memory = true;
  RankGroup(options).run([&](Communicator& communicator) {
    const Request request{.kind = OpKind::kBroadcast, .rows = 20'001, .root = 0};
    for (const bool by_peers : {false, true, true}) {
      const float mine = communicator.rank() == 0 ? 7 : 1;
      const DeviceArray x(gpu, 0, std::vector<float>(request.rows, mine));
      run(communicator, barrier_operation());
      const int before = gpu.calls("copy_on_device");
      run(communicator, barrier_operation());
      run(communicator, on_devices(make_operation(request), devices, &x, &x));
      EXPECT_EQ(x.seen(), std::vector<float>(request.rows, 7));
      run(communicator, barrier_operation());
      EXPECT_EQ(gpu.calls("copy_on_device") > before, by_peers);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Progress, DeviceNcclTest,
                         ::testing::Combine(::testing::Values(Progress::kLate, Progress::kSeeded,
                                                              Progress::kThreads),
                                            ::testing::Values(Layout{{2}}, Layout{{1, 1}})));

}  // namespace
}  // namespace multiring
