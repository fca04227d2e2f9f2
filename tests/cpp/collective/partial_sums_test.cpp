// Sums that are joined in steps have the bits of one reduction of all contributions, of every dtype, whatever
// the steps are.

#include "collective/sums/partial_sums.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "base/cache.h"
#include "support/oracles/reduce_oracle.h"

namespace multiring {
namespace {

using namespace testing;

std::vector<Reduction> reductions_of(DType dtype) {
  std::vector<Reduction> reductions;
  for (int number = 0; number < kReduceOpCount; ++number) {
    const auto op = static_cast<ReduceOp>(number);
    if (is_floating(dtype) ? is_bitwise(op) : op == ReduceOp::kAverage) continue;
    if (is_complex(dtype) && !has_complex(op)) continue;
    reductions.push_back({op});
    // Which contributions an integer's scale factor truncates does not depend on the steps.
    if (dtype != DType::kBool && !is_bitwise(op)) reductions.push_back({op, -1.7, 1.0 / 3});
  }
  return reductions;
}

/// Joins contributions in steps that are drawn by chance.
class ChanceJoin {
 public:
  ChanceJoin(PartialSums& sums, const std::vector<Bytes>& contributions, std::size_t count,
             std::uint32_t seed)
      : sums_(sums), contributions_(contributions), count_(count), random_(seed) {}

  /// The sum of `node`, which is not that of one rank alone, in memory of exactly its size.
  Bytes sum(Subtree node) {
    std::vector<Bytes> memory;
    std::vector<Subtree> nodes;
    const int split = canonical_split(node);
    collect({node.begin, split}, memory, nodes);
    collect({split, node.end}, memory, nodes);
    std::vector<PartialSums::Part> parts;
    for (std::size_t index = 0; index < nodes.size(); ++index)
      parts.push_back({nodes[index], reinterpret_cast<const std::byte*>(memory[index].data())});
    Bytes output(count_ * sums_.bytes_per_element(node));
    sums_.join(parts, node, output.data(), count_);
    return output;
  }

 private:
  /// Adds the sum of `node`, or those of nodes that make it up.
  void collect(Subtree node, std::vector<Bytes>& memory, std::vector<Subtree>& nodes) {
    if (node.size() > 1 && random_() % 2 == 0) {
      const int split = canonical_split(node);
      collect({node.begin, split}, memory, nodes);
      collect({split, node.end}, memory, nodes);
      return;
    }
    memory.push_back(node.size() == 1 ? contributions_[static_cast<std::size_t>(node.begin)] : sum(node));
    nodes.push_back(node);
  }

  PartialSums& sums_;
  const std::vector<Bytes>& contributions_;
  const std::size_t count_;
  std::mt19937 random_;
};

class PartialSumsOf : public ::testing::TestWithParam<int> {};

TEST_P(PartialSumsOf, HaveTheBitsOfOneReduction) {
  const auto dtype = static_cast<DType>(GetParam());
  for (const Reduction& reduction : reductions_of(dtype))
    for (const int ranks : {2, 3, 5, 8})
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, 3 * kCachedElements - 5}) {
        std::vector<Bytes> contributions;
        std::vector<const void*> inputs;
        for (int rank = 0; rank < ranks; ++rank)
          contributions.push_back(random_elements(dtype, count, static_cast<std::uint32_t>(rank), true));
        for (const Bytes& each : contributions) inputs.push_back(each.data());
        Bytes expected(count * dtype_size(dtype));
        void* const outputs[] = {expected.data()};
        reduce(dtype, reduction, inputs, outputs, count);
        PartialSums sums(dtype, reduction, ranks);
        for (std::uint32_t seed = 0; seed < 8; ++seed)
          ASSERT_TRUE(ChanceJoin(sums, contributions, count, seed).sum({0, ranks}) == expected)
              << reduce_op_name(reduction.op) << " of " << ranks << " ranks' " << count
              << " elements, prescale " << reduction.prescale << ", steps of seed " << seed;
      }
}

INSTANTIATE_TEST_SUITE_P(EveryDType, PartialSumsOf, ::testing::Range(0, kDTypeCount), [](const auto& info) {
  return std::string(dtype_name(static_cast<DType>(info.param)));
});

}  // namespace
}  // namespace multiring
