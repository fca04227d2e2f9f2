#include "support/oracles/comm_dtype_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/arithmetic/half.h"
#include "topology/canonical_tree.h"

namespace multiring::testing {
namespace {

Bytes rounded(CommDtype comm_dtype, const Bytes& floats) {
  const std::size_t count = floats.size() / sizeof(float);
  Bytes halves(count * 2);
  Bytes result(floats.size());
  narrow(rounded_dtype(comm_dtype), floats.data(), halves.data(), count);
  widen(rounded_dtype(comm_dtype), halves.data(), result.data(), count);
  return result;
}

class Oracle {
 public:
  Oracle(CommDtype comm_dtype, const ReduceProblem& problem, const std::vector<int>& host_of)
      : comm_dtype_(comm_dtype),
        problem_(problem),
        host_of_(host_of),
        op_(problem.reduction.op == ReduceOp::kAverage ? ReduceOp::kSum : problem.reduction.op) {}

  Bytes sum(Subtree node) const {
    if (one_host(node)) {
      std::vector<Bytes> inputs;
      for (int rank = node.begin; rank < node.end; ++rank) {
        inputs.push_back(problem_.inputs[static_cast<std::size_t>(rank)]);
        inputs.back().resize(std::min(inputs.back().size(), kPeriod * sizeof(float)));
      }
      return rounded(comm_dtype_, reduce_oracle(DType::kFloat32, {op_, problem_.reduction.prescale}, inputs));
    }
    const int split = canonical_split(node);
    return reduce_oracle(DType::kFloat32, {op_}, {sum({node.begin, split}), sum({split, node.end})});
  }

  Bytes result() const {
    Bytes bytes = sum({0, static_cast<int>(host_of_.size())});
    for (std::size_t offset = 0; offset < bytes.size(); offset += sizeof(float)) {
      float value = 0.0F;
      std::memcpy(&value, bytes.data() + offset, sizeof value);
      if (problem_.reduction.op == ReduceOp::kAverage) value /= static_cast<float>(host_of_.size());
      value *= static_cast<float>(problem_.reduction.postscale);
      std::memcpy(bytes.data() + offset, &value, sizeof value);
    }
    return rounded(comm_dtype_, bytes);
  }

 private:
  bool one_host(Subtree node) const {
    for (int rank = node.begin; rank < node.end; ++rank)
      if (host_of_[static_cast<std::size_t>(rank)] != host_of_[static_cast<std::size_t>(node.begin)])
        return false;
    return true;
  }

  const CommDtype comm_dtype_;
  const ReduceProblem& problem_;
  const std::vector<int>& host_of_;
  const ReduceOp op_;
};

}  // namespace

Bytes comm_dtype_oracle(CommDtype comm_dtype, const ReduceProblem& problem, const std::vector<int>& host_of) {
  return repeated(Oracle(comm_dtype, problem, host_of).result(), problem.count * sizeof(float));
}

double comm_dtype_error_bound(CommDtype comm_dtype, int ranks, double magnitude) {
  // Half of the last place: relative to a normal number, or absolute below them.
  const bool float16 = comm_dtype == CommDtype::kFloat16;
  const double relative = std::ldexp(1.0, float16 ? -11 : -8);
  const double least = std::ldexp(1.0, float16 ? -25 : -134);
  const double added = std::ldexp(static_cast<double>(ranks) + 2, -24);
  return magnitude * ((1 + relative) * (1 + relative) * (1 + added) - 1) + (ranks + 1) * least;
}

}  // namespace multiring::testing
