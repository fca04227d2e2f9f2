#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "collective/operation.h"
#include "engine/communicator.h"
#include "support/oracles/problem.h"
#include "support/rank_group.h"

namespace multiring::testing {

/// All dtypes; under sanitizers one of each kind, the widest among them, which would be the first to pass an
/// end of memory: the sums of all dtypes are compared without them.
std::vector<DType> tested_dtypes();
inline const std::vector<DType> kAllDTypes = tested_dtypes();

/// Whether a communicator reduces this dtype in this way, and the oracle too: bool has no sum and no average,
/// complex numbers have no order, and the oracle has no products of them.
constexpr bool is_accepted(DType dtype, ReduceOp op) {
  if (is_complex(dtype)) return op == ReduceOp::kSum || op == ReduceOp::kAverage;
  return dtype != DType::kBool || (op != ReduceOp::kSum && op != ReduceOp::kAverage);
}
inline constexpr ReduceOp kAllReduceOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin,
                                             ReduceOp::kMax, ReduceOp::kProduct};

/// A collective call as its callers think of it.
struct Request {
  OpKind kind = OpKind::kAllreduce;
  DType dtype = DType::kFloat32;
  std::uint64_t rows = 0;
  std::uint64_t row = 1;  ///< elements in a row
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t output_bytes = 0;
  int root = -1;
  Reduction reduction = {};
  std::string name = {};
  std::vector<std::uint64_t> splits = {};
  CommDtype comm_dtype = CommDtype::kDefault;
  Order order = Order::kDefault;
};
Operation make_operation(const Request& request);

/// An allreduce of `count` elements; `output` may be `input`.
Operation allreduce_of(DType dtype, std::size_t count, const void* input, void* output,
                       std::string_view name = {}, const Reduction& reduction = {});
/// A sum of all of `array`, in place.
template <typename T>
Operation sum_in_place(std::vector<T>& array, std::string_view name = {}) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, std::int64_t>);
  constexpr DType kDType = std::is_same_v<T, float> ? DType::kFloat32 : DType::kInt64;
  return allreduce_of(kDType, array.size(), array.data(), array.data(), name);
}
Operation barrier_operation(std::string_view name = {});
Operation send_of(DType dtype, std::size_t count, const void* input, int to, std::string_view name = {});
/// The allreduce of a problem.
Operation reduction_of(const ReduceProblem& problem, const void* input, void* output,
                       std::string_view name = {});

using Array = std::vector<std::int64_t>;

/// Runs an operation whose result is all in the caller's memory.
inline void run(Communicator& communicator, Operation operation, const CallOptions& options = {}) {
  communicator.run(operation, options);
}

enum class CallMode { kSync, kAsync };
inline constexpr CallMode kCallModes[] = {CallMode::kSync, CallMode::kAsync};
/// Runs `operation` in this thread, or submits it and waits.
void perform(Communicator& communicator, Operation& operation, CallMode mode = CallMode::kSync);
/// The same for an operation that is made for it; returns it.
Operation perform(Communicator& communicator, Operation&& operation, CallMode mode = CallMode::kSync);
Operation perform(Communicator& communicator, const Request& request, CallMode mode = CallMode::kSync);

/// Expects that `output` holds the result of `problem`.
void expect_result(const ReduceProblem& problem, const void* output, int rank);
/// Reduces this rank's input in place, in memory of its own, or at `place`, and expects the result.
void expect_reduced(Communicator& communicator, const ReduceProblem& problem, CallMode mode = CallMode::kSync,
                    std::byte* place = nullptr);

/// Pieces of an array of `count` elements, cut differently on every rank, some of them empty: every other one
/// goes from `input` to `output`, the others stay in `input`.
std::vector<Piece> pieces_of(const ReduceProblem& problem, int rank, Bytes& input, Bytes& output);
/// What they have become, one after the other.
Bytes output_of(const std::vector<Piece>& pieces);
/// The memory that the collective allocated for its result.
Bytes result_of(const Operation& operation);

/// A kind of group, as the parameter of a test.
struct GroupCase {
  TransportKind transport;
  int size;
  std::size_t staging_bytes;
  /// inproc only: a core for each rank, which changes what is small (Transport::oversubscribed)
  bool roomy = false;
  int hosts = 2;               ///< cluster only
  const char* unplanned = "";  ///< algorithm of what has no plan: "messages", "rounds"; "": by the table

  GroupOptions options() const {
    GroupOptions options(transport, size, staging_bytes);
    options.cores = roomy ? size : 1;
    options.hosts = hosts;
    for (const char* collective : {"gather", "scatter", "alltoall"})
      if (*unplanned != '\0')
        options.communicator.tuning += std::string(collective) + " 0- " + unplanned + "\n";
    return options;
  }
};
/// Staging memory in which a few kilobytes are many segments.
inline constexpr std::size_t kSmallStaging = 4096;
inline const std::size_t kDefaultStaging = JobSettings{}.staging_bytes;

/// Both transports with each of `sizes` and each of `stagings`.
std::vector<GroupCase> group_cases(const std::vector<int>& sizes, const std::vector<std::size_t>& stagings);
/// The same with 1, 2, 3, 4 and 7 ranks and small staging memory, four ranks with MPI between their hosts,
/// and seven on five hosts that pass rounds on.
std::vector<GroupCase> all_group_cases();
/// These, and inproc with a core for each rank.
std::vector<GroupCase> crowded_and_roomy_cases();
/// "shm_7_ranks_4096"
void PrintTo(const GroupCase& group, std::ostream* out);

/// A test over groups of several kinds.
class GroupTest : public ::testing::TestWithParam<GroupCase> {
 protected:
  GroupTest() : group_(GetParam().options()) {}
  int size() const { return group_.size(); }
  RankGroup group_;
};

}  // namespace multiring::testing
