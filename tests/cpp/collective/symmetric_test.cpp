// Buffers in symmetric memory: the direct way, mixtures of symmetric and ordinary buffers over the ranks, and
// how long the memory lives. All give the bits of the canonical tree.

#include <cstring>
#include <memory>
#include <vector>

#include "support/errors.h"
#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

constexpr std::size_t kRegionBytes = 256 * 1024;
// Here arrays are reduced where they lie (host_table.h).
constexpr std::size_t kDirectFrom = 16 * 1024;

ReduceProblem sum_problem(DType dtype, std::size_t bytes, int size) {
  return make_problem(dtype, {ReduceOp::kSum}, bytes / dtype_size(dtype), size);
}

std::vector<ReduceProblem> make_problems(int size) {
  std::vector<ReduceProblem> problems;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64, DType::kInt8})
    for (const std::size_t bytes : {0, 8, 4096, 16 * 1024, 16 * 1024 + 8, 65000})
      problems.push_back(sum_problem(dtype, bytes, size));
  return problems;
}

class SymmetricTest : public GroupTest {};

std::byte* copied_in(const Bytes& bytes, std::byte* to) {
  if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
  return to;
}

TEST_P(SymmetricTest, AllreduceInPlaceAndOutOfPlaceAtOffsetsOfItsOwn) {
  const std::vector<ReduceProblem> problems = make_problems(size());
  group_.run([&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    const auto region = communicator.allocate_symmetric(kRegionBytes, {});
    ASSERT_EQ(region->bytes_per_rank(), kRegionBytes);
    std::byte* const part = region->part(communicator.rank());
    for (const ReduceProblem& problem : problems) {
      // Not aligned to cache lines, and on every rank elsewhere.
      std::byte* input = copied_in(problem.inputs[rank], part + 8 * rank);
      std::byte* output = part + 128 * 1024 + 1024 * rank;
      run(communicator, reduction_of(problem, input, output));
      expect_result(problem, output, communicator.rank());
      EXPECT_TRUE(problem.bytes() == 0 ||
                  std::memcmp(input, problem.inputs[rank].data(), problem.bytes()) == 0);
      expect_reduced(communicator, problem, CallMode::kSync, input);
    }
  });
}

TEST_P(SymmetricTest, AllreduceUpToTheLastByteOfARegion) {
  const ReduceProblem problem = sum_problem(DType::kFloat32, 32 * 1024 + 4, size());
  group_.run([&](Communicator& communicator) {
    const auto region = communicator.allocate_symmetric(problem.bytes(), {});
    expect_reduced(communicator, problem, CallMode::kSync, region->part(communicator.rank()));
  });
}

// Every mixture of places over the ranks: all must take the same way through the rounds.
TEST_P(SymmetricTest, AllreduceWithOrdinaryAndSymmetricBuffersMixed) {
  const ReduceProblem problems[] = {sum_problem(DType::kFloat32, kDirectFrom + 4, size()),
                                    sum_problem(DType::kFloat16, 45000, size()),
                                    sum_problem(DType::kFloat32, 1000, size())};
  group_.run([&](Communicator& communicator) {
    const auto rank = static_cast<unsigned>(communicator.rank());
    const auto first = communicator.allocate_symmetric(kRegionBytes, {});
    const auto second = communicator.allocate_symmetric(kRegionBytes, {});
    std::vector<std::byte> ordinary(kRegionBytes);
    std::byte* const places[] = {ordinary.data(), first->part(communicator.rank()),
                                 second->part(communicator.rank())};
    for (unsigned mixture = 0; mixture < 27; ++mixture) {
      unsigned digits = mixture;  // in base 3, one for each rank; ranks beyond the third repeat them
      for (unsigned i = 0; i < rank % 3; ++i) digits /= 3;
      for (const ReduceProblem& problem : problems) {
        std::byte* input = copied_in(problem.inputs[rank], places[digits % 3]);
        std::byte* output = places[digits / 3 % 3] + 128 * 1024;
        run(communicator, reduction_of(problem, input, output));
        expect_result(problem, output, communicator.rank());
        expect_reduced(communicator, problem, CallMode::kSync, input);
      }
    }
  });
}

TEST_P(SymmetricTest, AsynchronousAllreducesOfViewsOfOneRegion) {
  const std::vector<ReduceProblem> problems = {
      sum_problem(DType::kFloat32, 20000, size()), sum_problem(DType::kFloat32, 40, size()),
      sum_problem(DType::kFloat32, 64000, size()), sum_problem(DType::kFloat32, 16384, size())};
  group_.run([&](Communicator& communicator) {
    const auto region = communicator.allocate_symmetric(kRegionBytes, {});
    for (int repeat = 0; repeat < 5; ++repeat) {
      std::vector<std::shared_ptr<Work>> works;
      std::vector<std::byte*> places;
      std::byte* place = region->part(communicator.rank());
      for (const ReduceProblem& problem : problems) {
        places.push_back(copied_in(problem.input(communicator.rank()), place));
        works.push_back(communicator.submit(reduction_of(problem, place, place, "view"), 0, nullptr));
        place += problem.bytes();
      }
      for (std::size_t i = 0; i < works.size(); ++i) {
        works[i]->wait(Deadline::never(), {});
        expect_result(problems[i], places[i], communicator.rank());
      }
    }
  });
}

// The ranks let go of a region at different times; a rank that no longer has it stages instead.
TEST_P(SymmetricTest, RegionsThatOnlySomeRanksStillHold) {
  const ReduceProblem problem = sum_problem(DType::kFloat32, 30000, size());
  group_.run([&](Communicator& communicator) {
    const auto rank = static_cast<std::size_t>(communicator.rank());
    std::vector<std::byte> ordinary(problem.bytes());
    for (unsigned repeat = 0; repeat < 12; ++repeat) {
      auto region = communicator.allocate_symmetric(problem.bytes(), {});
      if ((rank + repeat) % 3 == 0) region.reset();
      expect_reduced(communicator, problem, CallMode::kSync,
                     region ? region->part(communicator.rank()) : ordinary.data());
      if ((rank + repeat) % 3 == 1) region.reset();
    }
  });
}

// Work holds the memory it uses, whatever its submitter lets go.
TEST_P(SymmetricTest, WorkKeepsItsRegionMapped) {
  const ReduceProblem problem = sum_problem(DType::kFloat32, 60000, size());
  group_.run([&](Communicator& communicator) {
    auto region = communicator.allocate_symmetric(problem.bytes(), {});
    std::byte* place = copied_in(problem.input(communicator.rank()), region->part(communicator.rank()));
    const auto work = communicator.submit(reduction_of(problem, place, place), 0, nullptr);
    region.reset();
    work->wait(Deadline::never(), {});
    expect_result(problem, place, communicator.rank());
  });
}

TEST_P(SymmetricTest, OutlivesItsCommunicator) {
  group_.run([&](Communicator& communicator) {
    std::shared_ptr<SymmetricRegion> region;
    {
      const auto child = communicator.split(0, 0, {});
      region = child->allocate_symmetric(5000, {});
      child->close();
    }
    std::memset(region->part(communicator.rank()), 1 + communicator.rank(), region->bytes_per_rank());
    run_barrier(communicator);
    for (int rank = 0; rank < communicator.size(); ++rank) {
      const std::byte* part = region->part(rank);
      if (part == nullptr) continue;  // on another host
      EXPECT_EQ(part[4999], static_cast<std::byte>(1 + rank));
    }
    run_barrier(communicator);
  });
}

TEST_P(SymmetricTest, EmptyAndManyRegions) {
  group_.run([&](Communicator& communicator) {
    const auto empty = communicator.allocate_symmetric(0, {});
    EXPECT_EQ(empty->bytes_per_rank(), 0u);
    std::vector<std::shared_ptr<SymmetricRegion>> regions;
    for (std::size_t i = 1; i <= 40; ++i) {
      regions.push_back(communicator.allocate_symmetric(i * 100, {}));
      EXPECT_EQ(*regions.back()->part(communicator.rank()), std::byte{0});
    }
    for (std::size_t i = 0; i < regions.size(); ++i)
      std::memset(regions[i]->part(communicator.rank()), static_cast<int>(i), regions[i]->bytes_per_rank());
    run_barrier(communicator);
    for (std::size_t i = 0; i < regions.size(); ++i)
      for (int rank = 0; rank < communicator.size(); ++rank)
        if (const std::byte* part = regions[i]->part(rank); part != nullptr) {  // else on another host
          EXPECT_EQ(part[i * 100], static_cast<std::byte>(i));
        }
    run_barrier(communicator);
  });
}

INSTANTIATE_TEST_SUITE_P(Groups, SymmetricTest, ::testing::ValuesIn(crowded_and_roomy_cases()), kPrinted);

}  // namespace
}  // namespace multiring
