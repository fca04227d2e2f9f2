// Allreduces in peer memory of arrays in pieces, as gradients are: on the stand-ins for the driver and for
// NVRTC, ranks as threads of one process, which share a device and its memory.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/errors.h"
#include "support/named.h"
#include "support/peer_job.h"

namespace multiring {
namespace {

using namespace testing;

/// A piece of an array.
struct Cut {
  std::size_t count;
  bool on_host = false;
  std::size_t shift = 0;  // bytes by which it is not aligned
};
using Cuts = std::vector<Cut>;

/// A problem's input in pieces, which become the result.
class Gradients {
 public:
  Gradients(PeerJob& job, const ReduceProblem& problem, int rank, const Cuts& cuts)
      : job_(job), problem_(problem) {
    const std::size_t element = dtype_size(problem.dtype);
    const std::uintptr_t streams[] = {job.gpu.make_stream(0), job.gpu.make_stream(0)};
    auto next = problem.input(rank).begin();
    for (const Cut& cut : cuts) {
      Bytes values(cut.shift + cut.count * element);
      std::copy_n(next, cut.count * element, values.begin() + static_cast<std::ptrdiff_t>(cut.shift));
      next += static_cast<std::ptrdiff_t>(cut.count * element);
      if (cut.on_host)
        pieces_.push_back({cut, std::nullopt, std::move(values)});
      else
        pieces_.push_back({cut, DeviceBytes(job.gpu, values, streams[pieces_.size() % 2]), {}});
    }
    EXPECT_EQ(next, problem.input(rank).end());
  }

  Operation operation() {
    Operation made = reduction_of(problem_, nullptr, nullptr);
    made.on_devices = std::make_unique<DeviceArrays>();
    made.on_devices->devices = job_.devices;
    for (Part& part : pieces_) {
      Buffer buffer{.address = reinterpret_cast<std::byte*>(part.host.data()), .bytes = part.host.size()};
      if (part.device) buffer = part.device->buffer();
      buffer.address += part.cut.shift;
      buffer.bytes -= part.cut.shift;
      made.pieces.push_back({buffer.address, buffer.address, buffer.bytes});
      made.on_devices->pieces.push_back(buffer);
    }
    return made;
  }
  /// As kernels see it that are given now.
  Bytes seen() const {
    Bytes all;
    for (const Part& part : pieces_) {
      const Bytes bytes = part.device ? part.device->seen() : part.host;
      all.insert(all.end(), bytes.begin() + static_cast<std::ptrdiff_t>(part.cut.shift), bytes.end());
    }
    return all;
  }

 private:
  struct Part {
    Cut cut;
    std::optional<DeviceBytes> device;
    Bytes host;
  };

  PeerJob& job_;
  const ReduceProblem& problem_;
  std::vector<Part> pieces_;
};

void expect_reduced(PeerJob& job, Communicator& communicator, const ReduceProblem& problem, const Cuts& cuts,
                    CallMode mode = CallMode::kSync) {
  Gradients gradients(job, problem, communicator.rank(), cuts);
  Operation operation = gradients.operation();
  perform(communicator, operation, mode);
  EXPECT_TRUE(gradients.seen() == problem.expected) << problem.text() << " in " << cuts.size() << " pieces";
}

std::size_t count_of(const Cuts& cuts) {
  std::size_t count = 0;
  for (const Cut& cut : cuts) count += cut.count;
  return count;
}

/// Many small ones, some of them empty, some not aligned, as in a model of many layers; flags on the host.
Cuts small_pieces(std::size_t count, std::size_t step = 7, std::size_t longest = 401) {
  Cuts cuts;
  for (std::size_t i = 0, left = count; left > 0; ++i) {
    cuts.push_back({std::min(left, i * step % longest), false, i % 5 == 3 ? std::size_t{1} : 0});
    left -= cuts.back().count;
  }
  cuts.push_back({3, true});
  return cuts;
}

// With small ones between large ones slices of some ranks are parts of one piece, and those of others of
// several.
const std::vector<Cuts> kCuts = {
    {{20'001}},
    {{5}, {20'001, true}, {0}, {40'000}, {1, false, 2}, {20'003, false, 1}, {0, true}, {7, true}},
    small_pieces(17'000, 97, 2'003),
    {{0}, {0, true}, {16'385, true}},  // all of it on the host
    {{8'192}, {8'192}, {1}},
};

TEST(DevicePeerMemoryPiecesTest, EverySizeAndOrderOfWork) {
  const auto run = [](int size, Progress progress, std::uint64_t seed) {
    SCOPED_TRACE(numbered("seed ", seed));
    PeerJob job(size, progress, seed);
    job.group.run([&](Communicator& communicator) {
      std::vector<Cuts> all = kCuts;
      // In the other orders the stand-in rests after each copy.
      if (progress == Progress::kLate) all.push_back(small_pieces(40'000));
      for (const Cuts& cuts : all) {
        const ReduceProblem problem =
            make_problem(DType::kFloat32, {ReduceOp::kAverage}, count_of(cuts), size);
        for (const CallMode mode : kCallModes) expect_reduced(job, communicator, problem, cuts, mode);
      }
    });
    if (size > 1) {
      EXPECT_EQ(job.copies(), 0);
    }
    EXPECT_EQ(job.warnings, std::vector<std::string>());
  };
  for (const int size : {1, 2, 3, 4, 7}) {
    run(size, Progress::kLate, 0);
    for (std::uint64_t seed = 0; seed < 2; ++seed) run(size, Progress::kSeeded, seed);
    run(size, Progress::kThreads, 0);
  }
}

TEST(DevicePeerMemoryPiecesTest, EveryDTypeAndReduction) {
  PeerJob job(3);
  job.group.run([&](Communicator& communicator) {
    for (const DType dtype : kAllDTypes)  // complex ones pass through the host
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
        if (is_complex(dtype) || !is_accepted(dtype, op)) continue;
        // Bytes may lie anywhere.
        const std::size_t shift = dtype_size(dtype) == 1 ? 0 : 1;
        const std::size_t count = 70'001 / dtype_size(dtype);
        const Cuts cuts = {{3}, {count}, {count / 3, false, shift}, {count / 5}, {9, true}, {1}};
        const ReduceProblem problem = make_problem(dtype, {op}, count_of(cuts), 3);
        expect_reduced(job, communicator, problem, cuts);
      }
    const Cuts cuts = small_pieces(40'001);
    expect_reduced(job, communicator,
                   make_problem(DType::kBFloat16, {ReduceOp::kSum, 0.3, 7}, count_of(cuts), 3), cuts);
  });
  EXPECT_EQ(job.copies(), 0);
}

// Of pieces that lie in several segments, or end with one.
TEST(DevicePeerMemoryPiecesTest, Segments) {
  constexpr std::size_t kSegment = (std::size_t{2} << 20) / sizeof(float);
  const Cuts large = {{1}, {kSegment - 1}, {kSegment - 100}, {0}, {11, true}, {200}, {7}, {5}};
  for (const int size : {2, 3}) {
    const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, count_of(large), size);
    for (const Progress progress : {Progress::kLate, Progress::kSeeded, Progress::kThreads}) {
      PeerJob job(size, progress, 3);
      job.group.run([&](Communicator& communicator) {
        expect_reduced(job, communicator, make_problem(DType::kFloat32, {ReduceOp::kSum}, 20'001, size),
                       {{20'001}});
        Gradients gradients(job, problem, communicator.rank(), large);
        run(communicator, barrier_operation());
        // A larger buffer cannot be had.
        if (communicator.rank() == 1) job.gpu.fail_next("memory_alloc", cuda::kOutOfMemory);
        run(communicator, barrier_operation());
        run(communicator, gradients.operation());
        EXPECT_TRUE(gradients.seen() == problem.expected);
      });
      EXPECT_EQ(job.copies(), 0);
    }
  }
}

// The ranks have other parts of the array on their devices: it passes through the host, and so does what one
// rank has on the host. What comes next is reduced on the devices, if it is so on all.
TEST(DevicePeerMemoryPiecesTest, PiecesThatDiffer) {
  for (const Progress progress : {Progress::kLate, Progress::kSeeded, Progress::kThreads}) {
    PeerJob job(2, progress, 3);
    job.group.run([&](Communicator& communicator) {
      const bool first = communicator.rank() == 0;
      const Cuts same = {{100}, {20'000}, {1}};
      const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, count_of(same), 2);
      for (const Cuts& other : {Cuts{{100}, {20'000, true}, {1}}, Cuts{{100, true}, {20'000}, {1}},
                                Cuts{{99}, {20'001}, {1}}, Cuts{{20'101, true}}})
        for (const CallMode mode : kCallModes)
          expect_reduced(job, communicator, problem, first ? same : other, mode);
      run(communicator, barrier_operation());
      expect_reduced(job, communicator, problem, same);  // which may have been copied before
      run(communicator, barrier_operation());
      const int before = job.copies();
      expect_reduced(job, communicator, problem, same);
      run(communicator, barrier_operation());
      EXPECT_EQ(job.copies(), before);
    });
  }
}

TEST(DevicePeerMemoryPiecesTest, FailuresOnTheWay) {
  for (const auto& [function, failed] : {std::pair{"launch_kernel", "cuLaunchKernel on device 0 failed"},
                                         std::pair{"copy_on_device", "cuMemcpyDtoDAsync on device 0 failed"},
                                         std::pair{"event_query", "on device 0 failed"}}) {
    SCOPED_TRACE(function);
    for (const Progress progress : {Progress::kLate, Progress::kSeeded, Progress::kThreads}) {
      PeerJob job(3, progress);
      const Cuts& cuts = kCuts[1];
      const ReduceProblem problem = make_problem(DType::kFloat32, {ReduceOp::kSum}, count_of(cuts), 3);
      const auto outcomes = job.group.outcomes([&](Communicator& communicator) {
        expect_reduced(job, communicator, problem, cuts);
        Gradients gradients(job, problem, communicator.rank(), cuts);
        run(communicator, barrier_operation());
        if (communicator.rank() == 1) job.gpu.fail_next(function, 1);
        run(communicator, barrier_operation());
        run(communicator, gradients.operation());
      });
      expect_all_raised(outcomes, ErrorKind::kInternal, failed);
    }
  }
}

/// Whether two allreduces with different values are right; in the second one the device of a rank is far
/// behind the others', and one of its records is left out (negative: none).
bool are_right(int late, int ignored) {
  PeerJob job(2);
  bool right[2] = {};
  const auto outcomes = job.group.outcomes([&](Communicator& communicator) {
    bool is_right = true;
    for (int repeat = 0; repeat < 2; ++repeat) {
      const auto value = static_cast<float>(10 * repeat + communicator.rank() + 1);
      const DeviceArray one = job.array(20'001, value);
      const DeviceArray other = job.array(30'001, value);
      if (repeat == 1 && communicator.rank() == late) job.gpu.ignore_own_record(ignored);
      run(communicator, allreduce_of_pieces({one.buffer(), other.buffer()}, job.devices));
      const auto sum = static_cast<float>(20 * repeat + 3);
      is_right = job.seen_at_once(one) == std::vector<float>(20'001, sum) && is_right;
      is_right = job.seen_at_once(other) == std::vector<float>(30'001, sum) && is_right;
    }
    right[communicator.rank()] = is_right;
  });
  return right[0] && right[1] && !outcomes[0] && !outcomes[1];
}

// Those after the program's work on each piece, the copies to the buffer, the kernel, and the copies from the
// buffer.
TEST(DevicePeerMemoryPiecesTest, NoEventCanBeLeftOut) {
  for (const int late : {0, 1}) {
    EXPECT_TRUE(are_right(late, -1));
    for (int ignored = 0; ignored < 5; ++ignored)
      EXPECT_FALSE(are_right(late, ignored)) << "record " << ignored << " of rank " << late;
    EXPECT_TRUE(are_right(late, 5)) << "there are five";
  }
}

}  // namespace
}  // namespace multiring
