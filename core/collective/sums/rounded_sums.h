#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "base/arithmetic/dtype.h"
#include "base/arithmetic/reduction.h"
#include "base/export.h"
#include "collective/sums/partial_sums.h"
#include "topology/canonical_tree.h"

namespace multiring {

/// PartialSums of float32 that are of a half-precision dtype between hosts.
///
/// Within a host contributions are float32. A host's sum, scaled, is rounded whether it is sent or not, so
/// that the bits do not depend on which rank adds an element. It is added in float32 again; the result is
/// scaled, rounded, and widened on all ranks alike.
class MULTIRING_API RoundedSums {
 public:
  using Part = PartialSums::Part;

  /// `rounded`: float16 or bfloat16. `ranks`: how many contribute.
  RoundedSums(DType rounded, const Reduction& reduction, int ranks, Order order = Order::kCanonical);

  /// Writes what contributions of float32 add up to, `count` elements, rounded. `inputs`: of the ranks of a
  /// node, ascending, on one host. Nothing has to be aligned, here and below.
  void contribute(std::span<const std::byte* const> inputs, void* output, std::size_t count);
  /// Writes the sum of `node`, rounded, or the result. `parts`: rounded, of nodes that make it up, ascending.
  void join(std::span<const Part> parts, Subtree node, void* output, std::size_t count);
  /// Writes a result as float32.
  void restore(const std::byte* result, void* output, std::size_t count) const;

  /// All of that at once, where a rank has all contributions, with the bits of a plan of one dimension across
  /// hosts. `nodes`: of the hosts, ascending (host_nodes).
  void reduce_whole(std::span<const void* const> inputs, std::span<const Subtree> nodes, void* output,
                    std::size_t count);

 private:
  float* block(std::size_t index);

  const DType rounded_;
  const Reduction reduction_;
  PartialSums sums_;  // of float32 that has been scaled
  const int ranks_;
  std::vector<float> blocks_;
  std::vector<Part> widened_;
  std::vector<const void*> inputs_;
};

/// The hosts' nodes of the canonical tree, ascending: together all ranks. `host_of`: a rank's host number.
MULTIRING_API std::vector<Subtree> host_nodes(int ranks, const std::function<int(int)>& host_of);

}  // namespace multiring
