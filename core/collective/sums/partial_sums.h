#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/arithmetic/dtype.h"
#include "base/arithmetic/order.h"
#include "base/arithmetic/reduction.h"
#include "base/export.h"
#include "topology/canonical_tree.h"

namespace multiring {

/// Adds up what ranks contribute in several steps, with the bits of one reduce() of all contributions.
///
/// Sums of nodes of the canonical tree pass from step to step. That of a single rank is its contribution;
/// that of several is scaled already, and of the dtype computed in (float32 for half precision); that of all
/// ranks is the result. In any order the bits are those of the order in which sums are joined.
class MULTIRING_API PartialSums {
 public:
  struct Part {
    Subtree node;
    const std::byte* data;
  };

  /// `ranks`: how many contribute.
  PartialSums(DType dtype, const Reduction& reduction, int ranks, Order order = Order::kCanonical);

  /// Bytes of an element of the sum of `node`.
  std::size_t bytes_per_element(Subtree node) const;
  /// Writes the sum of `node`, of `count` elements. `parts`: nodes that make it up, ascending; none may
  /// overlap `output`, and nothing has to be aligned. In any order they are added as a balanced tree.
  void join(std::span<const Part> parts, Subtree node, void* output, std::size_t count);

 private:
  bool is_raw(Subtree node) const { return node.size() == 1 && ranks_ > 1; }
  bool is_all(Subtree node) const { return node.size() == ranks_; }
  std::size_t left_parts(std::span<const Part> parts, Subtree node) const;
  /// Whether one reduce() of `parts` gives the sum of `node` before the last scaling.
  bool in_one(std::span<const Part> parts, Subtree node) const;
  void reduce_parts(std::span<const Part> parts, DType dtype, const Reduction& reduction, std::size_t offset,
                    void* output, std::size_t count);
  void evaluate(std::span<const Part> parts, Subtree node, std::size_t offset, void* output,
                std::size_t count, std::size_t depth);
  void widen_raw(const Part& part, std::size_t offset, void* output, std::size_t count) const;
  void finish(void* block, void* output, std::size_t count) const;
  std::byte* scratch(std::size_t depth);

  const DType dtype_;
  const DType computed_;
  const Reduction reduction_;
  Reduction inner_;  // without scale factors and division
  const int ranks_;
  const Order order_;
  std::vector<std::byte> scratch_;
  std::vector<const void*> inputs_;
};

}  // namespace multiring
