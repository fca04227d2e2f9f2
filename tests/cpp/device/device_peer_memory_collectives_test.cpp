// Collectives other than allreduce in peer memory, on the stand-ins for the driver and for NVRTC: ranks as
// threads of one process, which share a device and its memory.

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/errors.h"
#include "support/named.h"
#include "support/peer_job.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

using namespace testing;

constexpr std::size_t kElement = sizeof(float);
constexpr std::size_t kSmallBuffer = (std::size_t{2} << 20) / kElement;

Bytes part_of(const Bytes& all, Range range) {
  return {all.begin() + static_cast<std::ptrdiff_t>(range.begin),
          all.begin() + static_cast<std::ptrdiff_t>(range.end)};
}

void append(Bytes& to, const Bytes& more) { to.insert(to.end(), more.begin(), more.end()); }

/// What a rank has, which no other one has.
Bytes values_of(int rank, std::size_t count) {
  return periodic_elements(DType::kFloat32, count, static_cast<std::uint32_t>(rank), true);
}

/// `request` of an array on the device, to another one or to memory of the collective's. `shift`: bytes by
/// which the input is not aligned.
Operation on_device(PeerJob& job, Request request, const DeviceBytes& input, const DeviceBytes* output,
                    std::size_t shift = 0) {
  Operation made = make_operation(request);
  made.splits = request.splits;
  made.on_devices = std::make_unique<DeviceArrays>();
  made.on_devices->devices = job.devices;
  Buffer from = input.buffer();
  from.address += shift;
  from.bytes -= shift;
  made.input = from.address;
  made.on_devices->input = from;
  if (output == nullptr) return made;
  made.on_devices->output = output->buffer();
  made.output = output->buffer().address;
  made.output_bytes = output->buffer().bytes;
  return made;
}

/// What the operation has allocated, as a kernel sees it that another stream is given now.
Bytes result_on_device(PeerJob& job, const Operation& operation) {
  Bytes seen(operation.result.bytes());
  EXPECT_TRUE(operation.result.buffer().on_device() || seen.empty());
  const std::uintptr_t stream = job.gpu.make_stream(0);
  job.gpu.launch(stream, [&] {
    if (!seen.empty()) std::memcpy(seen.data(), job.gpu.view(operation.result.data()), seen.size());
  });
  job.gpu.synchronize(stream);
  return seen;
}

/// A collective of `own` gives what is wanted, in either memory.
void expect(PeerJob& job, Communicator& communicator, CallMode mode, const Request& request, const Bytes& own,
            const Bytes& wanted) {
  const DeviceBytes input(job.gpu, own);
  const DeviceBytes output(job.gpu, Bytes(wanted.size(), 0xee));
  perform(communicator, on_device(job, request, input, &output), mode);
  EXPECT_TRUE(output.seen() == wanted) << own.size() << " bytes";
  const Operation done = perform(communicator, on_device(job, request, input, nullptr), mode);
  EXPECT_TRUE(result_on_device(job, done) == wanted) << own.size() << " bytes, allocated";
  EXPECT_TRUE(input.seen() == own);
}

/// Runs `body` on so many ranks, with the orders of work of the stand-in.
void for_each_order(const std::vector<int>& sizes, const std::function<void(PeerJob&, Communicator&)>& body) {
  for (const int size : sizes)
    for (const Progress progress : {Progress::kLate, Progress::kSeeded, Progress::kThreads}) {
      SCOPED_TRACE(numbered("ranks: ", static_cast<std::size_t>(size)));
      PeerJob job(size, progress, 3);
      job.group.run([&](Communicator& communicator) { body(job, communicator); });
      if (size > 1) {
        EXPECT_EQ(job.copies(), 0);
      }
      EXPECT_EQ(job.warnings, std::vector<std::string>());
    }
}

/// Has all ranks make buffers of 2 MiB, and no larger ones later.
void keep_small_buffers(PeerJob& job, Communicator& communicator) {
  const DeviceArray x = job.array(20'000, 1);
  run(communicator, allreduce_of(x, x, job.devices));
  run(communicator, barrier_operation());
  if (communicator.rank() == 1) job.gpu.fail_next("memory_alloc", cuda::kOutOfMemory);
  run(communicator, barrier_operation());
  const DeviceBytes input(job.gpu, Bytes(4 * kSmallBuffer * kElement));
  run(communicator,
      on_device(job, {.kind = OpKind::kBroadcast, .rows = 4 * kSmallBuffer, .root = 0}, input, &input));
}

Range block_of(const ReduceProblem& problem, std::size_t rows, const Communicator& communicator) {
  const std::size_t row = problem.bytes() / rows;
  const Range block = block_range(rows, static_cast<std::size_t>(communicator.size()),
                                  static_cast<std::size_t>(communicator.rank()));
  return {block.begin * row, block.end * row};
}

void expect_reduced(PeerJob& job, Communicator& communicator, CallMode mode, const ReduceProblem& problem,
                    std::size_t rows) {
  const Request request{.kind = OpKind::kReduceScatter,
                        .dtype = problem.dtype,
                        .rows = rows,
                        .row = problem.count / rows,
                        .reduction = problem.reduction};
  expect(job, communicator, mode, request, problem.input(communicator.rank()),
         part_of(problem.expected, block_of(problem, rows, communicator)));
}

// Blocks are unequal where the number of rows is no multiple of that of the ranks; some are empty.
TEST(DevicePeerMemoryCollectivesTest, ReduceScatter) {
  for_each_order({1, 2, 3, 4, 7}, [](PeerJob& job, Communicator& communicator) {
    for (const auto& [rows, row] : {std::pair<std::size_t, std::size_t>{1, 16'385},
                                    {5, 4'001},
                                    {20'001, 1},
                                    {3, 20'001},
                                    {16'384, 2}}) {
      const ReduceProblem problem =
          make_problem(DType::kFloat32, {ReduceOp::kAverage}, rows * row, communicator.size());
      for (const CallMode mode : kCallModes) expect_reduced(job, communicator, mode, problem, rows);
    }
  });
}

TEST(DevicePeerMemoryCollectivesTest, ReduceScatterOfEveryDType) {
  for_each_order({3}, [](PeerJob& job, Communicator& communicator) {
    for (const DType dtype : kAllDTypes)  // complex ones pass through the host
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin}) {
        if (is_complex(dtype) || !is_accepted(dtype, op)) continue;
        const ReduceProblem problem = make_problem(dtype, {op}, 70'001 / dtype_size(dtype), 3);
        expect_reduced(job, communicator, CallMode::kSync, problem, problem.count);
      }
  });
}

TEST(DevicePeerMemoryCollectivesTest, ReduceScatterInSegments) {
  for_each_order({2, 3}, [](PeerJob& job, Communicator& communicator) {
    keep_small_buffers(job, communicator);
    for (const auto& [rows, row] : {std::pair<std::size_t, std::size_t>{3, kSmallBuffer / 2},
                                    {kSmallBuffer, 1},
                                    {kSmallBuffer + 13, 1}}) {
      const ReduceProblem problem =
          make_problem(DType::kFloat32, {ReduceOp::kSum}, rows * row, communicator.size());
      expect_reduced(job, communicator, CallMode::kSync, problem, rows);
    }
  });
}

// Of one rank, whose own block passes through its buffer then.
TEST(DevicePeerMemoryCollectivesTest, ReduceScatterOfAnArrayThatIsNotAligned) {
  for_each_order({2}, [](PeerJob& job, Communicator& communicator) {
    const std::size_t shift = communicator.rank();
    const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, 20'001, 2);
    Bytes values(shift);
    append(values, problem.input(communicator.rank()));
    const DeviceBytes input(job.gpu, values);
    const Operation done =
        perform(communicator,
                on_device(job, {.kind = OpKind::kReduceScatter, .rows = 20'001}, input, nullptr, shift));
    EXPECT_EQ(result_on_device(job, done),
              part_of(problem.expected, block_of(problem, 20'001, communicator)));
  });
}

// Small arrays, averages of integers; not sums in any order.
TEST(DevicePeerMemoryCollectivesTest, WhatPassesThroughTheHost) {
  PeerJob job(2);
  job.group.run([&](Communicator& communicator) {
    const ReduceProblem small = make_problem(DType::kFloat32, {ReduceOp::kSum}, 101, 2);
    expect_reduced(job, communicator, CallMode::kSync, small, 101);
    const ReduceProblem average = make_problem(DType::kInt32, {ReduceOp::kAverage}, 20'001, 2);
    expect_reduced(job, communicator, CallMode::kSync, average, 20'001);
    const DeviceBytes ones(job.gpu, encoded(DType::kFloat32, std::vector<int>(20'000, 1)));
    Operation any = on_device(job, {.kind = OpKind::kReduceScatter, .rows = 20'000}, ones, nullptr);
    any.descriptor.key.order = Order::kAny;
    EXPECT_EQ(result_on_device(job, perform(communicator, std::move(any))),
              encoded(DType::kFloat32, std::vector<int>(10'000, 2)));
  });
  EXPECT_EQ(job.copies(), 2 * (2 + 2));
}

void expect_broadcast(PeerJob& job, Communicator& communicator, CallMode mode, std::size_t count, int root) {
  const Bytes own = values_of(communicator.rank(), count);
  const Request request{.kind = OpKind::kBroadcast, .rows = count, .root = root};
  const DeviceBytes input(job.gpu, own);
  const DeviceBytes output(job.gpu, Bytes(own.size(), 0xee));
  perform(communicator, on_device(job, request, input, &output), mode);
  EXPECT_TRUE(output.seen() == values_of(root, count)) << count << " from " << root;
  EXPECT_TRUE(input.seen() == own);
  perform(communicator, on_device(job, request, input, &input), mode);
  EXPECT_TRUE(input.seen() == values_of(root, count)) << count << " in place";
}

void expect_allgather(PeerJob& job, Communicator& communicator, CallMode mode,
                      const std::function<std::size_t(int rank)>& rows_of) {
  Bytes wanted;
  for (int rank = 0; rank < communicator.size(); ++rank) append(wanted, values_of(rank, rows_of(rank)));
  const std::size_t rows = rows_of(communicator.rank());
  expect(job, communicator, mode, {.kind = OpKind::kAllgather, .rows = rows},
         values_of(communicator.rank(), rows), wanted);
}

void expect_gather(PeerJob& job, Communicator& communicator, CallMode mode, int root,
                   const std::function<std::size_t(int rank)>& rows_of) {
  Bytes wanted;
  for (int rank = 0; rank < communicator.size(); ++rank) append(wanted, values_of(rank, rows_of(rank)));
  const std::size_t rows = rows_of(communicator.rank());
  const Bytes own = values_of(communicator.rank(), rows);
  const Request request{.kind = OpKind::kGather, .rows = rows, .root = root};
  if (communicator.rank() == root) return expect(job, communicator, mode, request, own, wanted);
  const DeviceBytes input(job.gpu, own);
  for (int repeat = 0; repeat < 2; ++repeat)  // as often as the root
    perform(communicator, on_device(job, request, input, nullptr), mode);
  EXPECT_TRUE(input.seen() == own);
}

/// Rows that rank `from` has for rank `to`: none for some.
std::uint64_t rows_for(int from, int to, std::size_t count) {
  return (from + to) % 3 == 2 ? 0 : count + static_cast<std::uint64_t>(10 * from + to);
}

void expect_alltoall(PeerJob& job, Communicator& communicator, CallMode mode, std::size_t count) {
  const int self = communicator.rank();
  Request request{.kind = OpKind::kAlltoall};
  Bytes wanted;
  for (int peer = 0; peer < communicator.size(); ++peer) {
    std::size_t begin = 0;
    std::size_t total = 0;
    for (int reader = 0; reader < communicator.size(); ++reader) {
      if (reader < self) begin += rows_for(peer, reader, count);
      total += rows_for(peer, reader, count);
    }
    const std::size_t end = begin + rows_for(peer, self, count);
    append(wanted, part_of(values_of(peer, total), {begin * kElement, end * kElement}));
    request.splits.push_back(rows_for(self, peer, count));
    request.rows += request.splits.back();
  }
  expect(job, communicator, mode, request, values_of(self, request.rows), wanted);
}

TEST(DevicePeerMemoryCollectivesTest, WhatMovesBytes) {
  for_each_order({2, 3, 4, 7}, [](PeerJob& job, Communicator& communicator) {
    for (const CallMode mode : kCallModes) {
      for (const std::size_t count : {16'384, 20'001})
        expect_broadcast(job, communicator, mode, count, communicator.size() - 1);
      expect_allgather(job, communicator, mode, [](int) { return 20'001; });
      expect_allgather(job, communicator, mode, [](int rank) { return 16'385 + 1'001 * (rank % 3); });
      expect_gather(job, communicator, mode, 1, [](int rank) { return 16'385 + 1'001 * (rank % 3); });
      expect_alltoall(job, communicator, mode, 16'385);
    }
  });
}

// From each root; ranks that have few rows copy these to the host, before they know of the others'.
TEST(DevicePeerMemoryCollectivesTest, RootsAndFewRows) {
  PeerJob job(3);
  job.group.run([&](Communicator& communicator) {
    for (const int root : {0, 1, 2}) expect_broadcast(job, communicator, CallMode::kSync, 20'001, root);
    const auto rows_of = [](int rank) { return rank == 1 ? 50'001 : 7; };
    expect_allgather(job, communicator, CallMode::kSync, rows_of);
    for (const int root : {0, 1, 2}) expect_gather(job, communicator, CallMode::kSync, root, rows_of);
  });
  EXPECT_EQ(job.copies(), 4 * 2 * 2);
}

TEST(DevicePeerMemoryCollectivesTest, WhatMovesBytesInSegments) {
  for_each_order({2, 3}, [](PeerJob& job, Communicator& communicator) {
    keep_small_buffers(job, communicator);
    expect_broadcast(job, communicator, CallMode::kSync, 2 * kSmallBuffer + 7, 1);
    const auto rows_of = [](int rank) {
      return rank == 0 ? 20'000 : kSmallBuffer * static_cast<std::size_t>(rank) + 1;
    };
    expect_allgather(job, communicator, CallMode::kSync, rows_of);
    expect_gather(job, communicator, CallMode::kSync, 0, rows_of);
    expect_alltoall(job, communicator, CallMode::kSync, kSmallBuffer);
  });
}

/// One of these of `x`, to where the collective allocates it, or in place.
Operation made(PeerJob& job, OpKind kind, const DeviceBytes& x) {
  const std::size_t rows = x.buffer().bytes / kElement;
  Request request{.kind = kind, .rows = rows};
  if (kind == OpKind::kBroadcast) request.root = 0;
  if (kind == OpKind::kAlltoall) request.splits = {rows / 2, rows - rows / 2};
  return on_device(job, request, x, kind == OpKind::kBroadcast ? &x : nullptr);
}

constexpr OpKind kKinds[] = {OpKind::kBroadcast, OpKind::kAllgather, OpKind::kReduceScatter,
                             OpKind::kAlltoall};

// Without kernels what moves bytes stays on the devices.
TEST(DevicePeerMemoryCollectivesTest, KernelsThatCannotBeCompiled) {
  ::setenv("FAKE_NVRTC", "fail=compile", 1);
  PeerJob job(2);
  job.group.run([&](Communicator& communicator) {
    const DeviceBytes x(job.gpu, encoded(DType::kFloat32, std::vector<int>(20'000, 1)));
    for (const OpKind kind : kKinds) {
      const int before = job.copies();
      run(communicator, barrier_operation());
      Operation operation = made(job, kind, x);
      perform(communicator, operation);
      if (kind == OpKind::kReduceScatter) {
        EXPECT_EQ(result_on_device(job, operation), encoded(DType::kFloat32, std::vector<int>(10'000, 2)));
      }
      run(communicator, barrier_operation());
      EXPECT_EQ(job.copies(), before + (kind == OpKind::kReduceScatter ? 2 : 0));
      run(communicator, barrier_operation());
    }
  });
  ::unsetenv("FAKE_NVRTC");
  ASSERT_EQ(job.warnings.size(), 1U);
  expect_text(job.warnings[0], "nvrtcCompileProgram failed");
}

TEST(DevicePeerMemoryCollectivesTest, FailuresOnTheWay) {
  for (const OpKind kind : kKinds)
    for (const char* const function : {"copy_on_device", "event_record", "launch_kernel"}) {
      if (kind != OpKind::kReduceScatter && std::string(function) == "launch_kernel") continue;
      for (const Progress progress : {Progress::kLate, Progress::kSeeded, Progress::kThreads}) {
        PeerJob job(2, progress);
        const auto outcomes = job.group.outcomes([&](Communicator& communicator) {
          const DeviceBytes x(job.gpu, values_of(communicator.rank(), 20'000));
          perform(communicator, made(job, kind, x));
          run(communicator, barrier_operation());
          if (communicator.rank() == 0) job.gpu.fail_next(function, 1);
          run(communicator, barrier_operation());
          perform(communicator, made(job, kind, x));
        });
        expect_all_raised(outcomes, ErrorKind::kInternal, "on device 0 failed");
      }
    }
}

/// Whether two collectives of different values are right on both ranks, as streams see it that wait for
/// nothing; in the second one the device of a rank is far behind the others', and one of its records is left
/// out (negative: none).
bool are_right(OpKind kind, int late, int ignored) {
  PeerJob job(2);
  bool right[2] = {};
  const auto outcomes = job.group.outcomes([&](Communicator& communicator) {
    bool is_right = true;
    for (int repeat = 0; repeat < 2; ++repeat) {
      const auto value_of = [&](int rank) { return 10 * repeat + rank + 1; };
      const int rank = communicator.rank();
      const DeviceBytes x(job.gpu, encoded(DType::kFloat32, std::vector<int>(20'000, value_of(rank))));
      const DeviceBytes out(job.gpu, Bytes(40'000 * kElement), x.buffer().stream);
      std::vector<int> wanted(10'000, value_of(0));
      const std::vector<int> second(10'000, value_of(1));
      if (kind == OpKind::kReduceScatter) wanted.assign(10'000, value_of(0) + value_of(1));
      if (kind == OpKind::kAlltoall) wanted.insert(wanted.end(), second.begin(), second.end());
      if (kind == OpKind::kAllgather) {
        wanted.resize(20'000, value_of(0));
        wanted.resize(40'000, value_of(1));
      }
      if (kind == OpKind::kBroadcast) wanted.resize(20'000, value_of(0));
      Operation operation = made(job, kind, x);
      operation.on_devices->output = out.buffer();
      operation.on_devices->output.bytes = operation.output_bytes = wanted.size() * kElement;
      operation.output = out.buffer().address;
      if (repeat == 1 && rank == late) job.gpu.ignore_own_record(ignored);
      run(communicator, std::move(operation));
      Bytes seen(wanted.size() * kElement);
      const std::uintptr_t stream = job.gpu.make_stream(0);
      job.gpu.launch(stream,
                     [&] { std::memcpy(seen.data(), job.gpu.view(out.buffer().address), seen.size()); });
      job.gpu.synchronize(stream);
      is_right = is_right && seen == encoded(DType::kFloat32, wanted);
    }
    right[communicator.rank()] = is_right;
  });
  return right[0] && right[1] && !outcomes[0] && !outcomes[1];
}

// Those after the program's work, the copies to the buffer, and the kernel or the copies from the buffers.
TEST(DevicePeerMemoryCollectivesTest, NoEventCanBeLeftOut) {
  for (const OpKind kind : kKinds) {
    for (const int none : {-1, 3}) EXPECT_TRUE(are_right(kind, 0, none)) << "there are three";
    for (int ignored = 0; ignored < 3; ++ignored)
      EXPECT_FALSE(are_right(kind, 0, ignored)) << static_cast<int>(kind) << ": record " << ignored;
  }
}

}  // namespace
}  // namespace multiring
