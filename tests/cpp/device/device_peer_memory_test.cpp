// Allreduces in peer memory, on the stand-ins for the driver and for NVRTC: ranks as threads of one process,
// which share a device and its memory.

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support/errors.h"
#include "support/named.h"
#include "support/peer_job.h"

namespace multiring {
namespace {

using namespace testing;

constexpr std::size_t kCount = 20'001;
constexpr std::size_t kBuffer = std::size_t{64} << 20;  // bytes; longer arrays pass in segments

/// Into memory of its own, or in place.
void expect_in_peer_memory(PeerJob& job, Communicator& communicator, const ReduceProblem& problem,
                           bool in_place, CallMode mode = CallMode::kSync, Order order = Order::kCanonical) {
  const Bytes& values = problem.input(communicator.rank());
  const DeviceBytes input(job.gpu, values);
  const DeviceBytes other(job.gpu, Bytes(problem.bytes(), 0xee));
  const DeviceBytes& output = in_place ? input : other;
  Operation operation = reduction_of(problem, input.buffer().address, output.buffer().address);
  operation.on_devices = std::make_unique<DeviceArrays>();
  operation.on_devices->devices = job.devices;
  operation.on_devices->input = input.buffer();
  operation.on_devices->output = output.buffer();
  operation.descriptor.key.order = order;
  perform(communicator, operation, mode);
  EXPECT_EQ(output.seen(), problem.expected) << problem.text();
  if (!in_place) {
    EXPECT_EQ(input.seen(), values) << problem.text();
  }
}

TEST(DevicePeerMemoryTest, EveryDTypeAndReduction) {
  PeerJob job(3);
  job.group.run([&](Communicator& communicator) {
    for (const DType dtype : kAllDTypes)  // complex ones pass through the host
      for (int op = 0; op < kReduceOpCount; ++op) {
        const auto reduces = static_cast<ReduceOp>(op);
        if (is_floating(dtype) ? is_bitwise(reduces) : reduces == ReduceOp::kAverage) continue;
        if (is_complex(dtype) || !is_accepted(dtype, reduces)) continue;
        const std::size_t count = 70'001 / dtype_size(dtype) + 1;
        const ReduceProblem problem = make_problem(dtype, {reduces}, count, 3);
        expect_in_peer_memory(job, communicator, problem, op % 2 == 0);
      }
    const ReduceProblem scaled = make_problem(DType::kBFloat16, {ReduceOp::kSum, 0.3, 7}, 40'001, 3);
    expect_in_peer_memory(job, communicator, scaled, true);
  });
  EXPECT_EQ(job.copies(), 0);
  EXPECT_EQ(job.warnings, std::vector<std::string>());
}

TEST(DevicePeerMemoryTest, EverySizeAndOrderOfWork) {
  const auto run = [](int size, Progress progress, std::uint64_t seed) {
    SCOPED_TRACE(numbered("seed ", seed));
    PeerJob job(size, progress, seed);
    job.group.run([&](Communicator& communicator) {
      for (const std::size_t count : {std::size_t{16'384}, kCount, std::size_t{600'007}}) {
        const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kAverage}, count, size);
        for (const CallMode mode : kCallModes)
          for (const bool in_place : {false, true})
            expect_in_peer_memory(job, communicator, problem, in_place, mode);
      }
    });
    EXPECT_EQ(job.copies(), 0);
  };
  for (const int size : {2, 3, 4, 7}) {
    run(size, Progress::kLate, 0);
    for (std::uint64_t seed = 0; seed < 3; ++seed) run(size, Progress::kSeeded, seed);
    run(size, Progress::kThreads, 0);
  }
}

TEST(DevicePeerMemoryTest, SegmentsOfLargeArrays) {
  PeerJob job(2, Progress::kSeeded, 1);
  constexpr std::size_t kLarge = kBuffer / sizeof(float) + 1001;
  job.group.run([&](Communicator& communicator) {
    const DeviceArray x = job.array(kLarge, static_cast<float>(communicator.rank() + 1));
    run(communicator, allreduce_of(x, x, job.devices));
    EXPECT_TRUE(x.seen() == std::vector<float>(kLarge, 3));
  });
  EXPECT_EQ(job.copies(), 0);
}

// The canonical order is one of any.
TEST(DevicePeerMemoryTest, AnyOrderWithoutNccl) {
  PeerJob job(3);
  job.group.run([&](Communicator& communicator) {
    for (const DType dtype : {DType::kInt16, DType::kFloat32}) {
      const ReduceProblem problem = make_problem(dtype, {ReduceOp::kMax}, 70'001, 3);
      expect_in_peer_memory(job, communicator, problem, false, CallMode::kSync, Order::kAny);
    }
  });
  EXPECT_EQ(job.copies(), 0);
}

// Small arrays, averages of integers, one rank, arrays on the host of one rank.
TEST(DevicePeerMemoryTest, WhatPassesThroughTheHost) {
  PeerJob job(2);
  job.group.run([&](Communicator& communicator) {
    const DeviceArray small = job.array(100, 1);
    run(communicator, allreduce_of(small, small, job.devices));
    EXPECT_EQ(small.seen(), std::vector<float>(100, 2));
    const DeviceArray x = job.array(kCount, 2);
    std::vector<float> on_host(kCount, 2);
    run(communicator, communicator.rank() == 1 ? sum_in_place(on_host) : allreduce_of(x, x, job.devices));
    EXPECT_EQ(communicator.rank() == 1 ? on_host : x.seen(), std::vector<float>(kCount, 4));
    const ReduceProblem average = make_problem(DType::kInt32, {ReduceOp::kAverage}, kCount, 2);
    expect_in_peer_memory(job, communicator, average, true);
  });
  EXPECT_EQ(job.copies(), 2 + 1 + 2);
}

// Kernels cannot read its elements where they lie: all of it passes through the buffer.
TEST(DevicePeerMemoryTest, AnArrayThatIsNotAligned) {
  PeerJob job(2);
  job.group.run([&](Communicator& communicator) {
    const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, kCount, 2);
    Bytes values(problem.bytes() + sizeof(float));
    const std::size_t shift = communicator.rank();
    std::ranges::copy(problem.input(communicator.rank()),
                      values.begin() + static_cast<std::ptrdiff_t>(shift));
    const DeviceBytes memory(job.gpu, values);
    Buffer buffer = memory.buffer();
    buffer.address += shift;
    buffer.bytes = problem.bytes();
    Operation operation = reduction_of(problem, buffer.address, buffer.address);
    operation.on_devices = std::make_unique<DeviceArrays>();
    operation.on_devices->devices = job.devices;
    operation.on_devices->input = operation.on_devices->output = buffer;
    perform(communicator, operation, CallMode::kSync);
    const Bytes seen = memory.seen();
    const auto begin = seen.begin() + static_cast<std::ptrdiff_t>(shift);
    EXPECT_EQ(Bytes(begin, begin + static_cast<std::ptrdiff_t>(problem.bytes())), problem.expected);
  });
  EXPECT_EQ(job.copies(), 0);
  EXPECT_EQ(job.warnings, std::vector<std::string>());
}

TEST(DevicePeerMemoryTest, AtMostSixteenRanks) {
  for (const int size : {16, 17}) {
    PeerJob job(size);
    job.group.run([&](Communicator& communicator) {
      const DeviceArray x = job.array(kCount, 1);
      run(communicator, allreduce_of(x, x, job.devices));
      EXPECT_EQ(x.seen(), std::vector<float>(kCount, static_cast<float>(size)));
    });
    EXPECT_EQ(job.copies(), size == 16 ? 0 : 17);
  }
}

// Then arrays pass in segments, as they did; without a word, as nothing goes another way.
TEST(DevicePeerMemoryTest, LargerBuffersThatCannotBeHad) {
  for (const bool comes_first : {false, true}) {
    PeerJob job(2);
    job.group.run([&](Communicator& communicator) {
      const DeviceArray x = job.array(kCount, 1);
      const DeviceArray large = job.array(900'000, 1);
      if (!comes_first) run(communicator, allreduce_of(x, x, job.devices));
      run(communicator, barrier_operation());
      // Both ranks' small buffers are made before.
      if (communicator.rank() == 1)
        job.gpu.fail_next("memory_alloc", cuda::kOutOfMemory, comes_first ? 2 : 0);
      run(communicator, barrier_operation());
      for (const DeviceArray* each : {&large, &x, &large})
        run(communicator, allreduce_of(*each, *each, job.devices));
      EXPECT_EQ(large.seen(), std::vector<float>(900'000, 4));
      EXPECT_EQ(x.seen(), std::vector<float>(kCount, comes_first ? 2 : 4));
    });
    EXPECT_EQ(job.copies(), 0);
    EXPECT_EQ(job.warnings, std::vector<std::string>());
  }
}

// A rank that cannot do its part at the start has all pass through the host, then and later.
TEST(DevicePeerMemoryTest, RanksThatCannot) {
  for (const char* const function : {"module_load", "module_function", "memory_alloc", "ipc_export"}) {
    SCOPED_TRACE(function);
    PeerJob job(2);
    job.group.run([&](Communicator& communicator) {
      const DeviceArray x = job.array(kCount, 1);
      const DeviceArray y = job.array(kCount, 1);
      run(communicator, barrier_operation());
      if (communicator.rank() == 1) job.gpu.fail_next(function, cuda::kOutOfMemory);
      run(communicator, barrier_operation());
      for (const DeviceArray* each : {&x, &y}) {
        run(communicator, allreduce_of(*each, *each, job.devices));
        EXPECT_EQ(each->seen(), std::vector<float>(kCount, 2));
      }
    });
    EXPECT_GT(job.copies(), 0);
    ASSERT_EQ(job.warnings.size(), 1U);
    expect_text(job.warnings[0], "not through peer memory: rank");
    expect_text(job.warnings[0], "CUDA_ERROR_OUT_OF_MEMORY");
  }
}

TEST(DevicePeerMemoryTest, KernelsThatCannotBeCompiled) {
  ::setenv("FAKE_NVRTC", "fail=compile", 1);
  PeerJob job(2);
  job.group.run([&](Communicator& communicator) {
    const DeviceArray x = job.array(kCount, 1);
    run(communicator, allreduce_of(x, x, job.devices));
    EXPECT_EQ(x.seen(), std::vector<float>(kCount, 2));
  });
  ::unsetenv("FAKE_NVRTC");
  ASSERT_EQ(job.warnings.size(), 1U);
  expect_text(job.warnings[0], "nvrtcCompileProgram failed");
  expect_text(job.warnings[0], "reduce.cu(1): error: as injected");
}

TEST(DevicePeerMemoryTest, FailuresOnTheWay) {
  for (const auto& [function, failed] : {std::pair{"launch_kernel", "cuLaunchKernel on device 0 failed"},
                                         std::pair{"copy_on_device", "cuMemcpyDtoDAsync on device 0 failed"},
                                         std::pair{"event_record", "cuEventRecord on device 0 failed"}}) {
    SCOPED_TRACE(function);
    for (const Progress progress : {Progress::kLate, Progress::kSeeded, Progress::kThreads}) {
      PeerJob job(3, progress);
      const auto outcomes = job.group.outcomes([&](Communicator& communicator) {
        const DeviceArray x = job.array(kCount, 1);
        run(communicator, allreduce_of(x, x, job.devices));
        EXPECT_EQ(x.seen(), std::vector<float>(kCount, 3));
        run(communicator, barrier_operation());
        if (communicator.rank() == 1) job.gpu.fail_next(function, 1);
        run(communicator, barrier_operation());
        run(communicator, allreduce_of(x, x, job.devices));
      });
      expect_all_raised(outcomes, ErrorKind::kInternal, failed);
    }
  }
}

// Kernels of the others may still write to the buffers of an operation that has failed.
TEST(DevicePeerMemoryTest, BuffersOfAFailureServeNeverAgain) {
  PeerJob job(2);
  const auto fill = [&](Communicator& communicator, bool fails) {
    const DeviceArray x = job.array(kCount, 1);
    run(communicator, barrier_operation());
    if (fails && communicator.rank() == 1) job.gpu.fail_next("launch_kernel", 1);
    run(communicator, barrier_operation());
    run(communicator, allreduce_of(x, x, job.devices));
    EXPECT_EQ(x.seen(), std::vector<float>(kCount, 2));
  };
  expect_all_raised(job.group.outcomes([&](Communicator& each) { fill(each, true); }), ErrorKind::kInternal,
                    "cuLaunchKernel on device 0 failed");
  const std::size_t blocks = job.gpu.device_blocks();
  RankGroup next(job.options(2));
  next.run([&](Communicator& each) { fill(each, false); });
  EXPECT_EQ(job.gpu.device_blocks(), blocks + 4) << "two arrays and two buffers";
}

// The buffer of a communicator that is closed serves the next one.
TEST(DevicePeerMemoryTest, MemoryIsGivenBack) {
  PeerJob job(2);
  std::size_t blocks = 0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    RankGroup group(job.options(2));
    group.run([&](Communicator& communicator) {
      const DeviceArray x = job.array(kCount, 1);
      run(communicator, allreduce_of(x, x, job.devices));
    });
    const std::size_t arrays = 2 * static_cast<std::size_t>(repeat + 1);
    if (repeat == 0) blocks = job.gpu.device_blocks() - arrays;
    EXPECT_EQ(job.gpu.device_blocks() - arrays, blocks);
  }
  EXPECT_EQ(blocks, 2U);
}

// Its peers need it no more.
TEST(DevicePeerMemoryTest, RankThatLeavesWhenItIsDone) {
  PeerJob job(2);
  job.group.run([&](Communicator& communicator) {
    const DeviceArray x = job.array(kCount, 1);
    if (communicator.rank() == 0) job.gpu.ignore_own_record(-1);  // its device is far behind
    run(communicator, allreduce_of(x, x, job.devices));
    if (communicator.rank() == 1) communicator.close();
    EXPECT_EQ(x.seen(), std::vector<float>(kCount, 2));
  });
}

/// Whether an allreduce, and one more with other values, are right; in the second one the device of a rank is
/// far behind the others', and one of its records is left out (negative: none).
bool are_right(int late, int ignored) {
  PeerJob job(2);
  bool right[2] = {};
  const auto outcomes = job.group.outcomes([&](Communicator& communicator) {
    bool is_right = true;
    for (int repeat = 0; repeat < 2; ++repeat) {
      const DeviceArray x = job.array(kCount, static_cast<float>(10 * repeat + communicator.rank() + 1));
      if (repeat == 1 && communicator.rank() == late) job.gpu.ignore_own_record(ignored);
      run(communicator, allreduce_of(x, x, job.devices));
      const auto sum = static_cast<float>(20 * repeat + 3);
      is_right = job.seen_at_once(x) == std::vector<float>(kCount, sum) && is_right;
    }
    right[communicator.rank()] = is_right;
  });
  return right[0] && right[1] && !outcomes[0] && !outcomes[1];
}

// Those after the program's work, the copies to the buffer, the kernel, and the copies from the buffer.
TEST(DevicePeerMemoryTest, NoEventCanBeLeftOut) {
  for (const int late : {0, 1}) {
    EXPECT_TRUE(are_right(late, -1));
    for (int ignored = 0; ignored < 4; ++ignored)
      EXPECT_FALSE(are_right(late, ignored)) << "record " << ignored << " of rank " << late;
    EXPECT_TRUE(are_right(late, 4)) << "there are four";
  }
}

}  // namespace
}  // namespace multiring
