// A binomial tree to the first rank of the group and back; in a host the first rank reads all others.

#include <algorithm>
#include <bit>

#include "topology/algorithms/hop.h"

namespace multiring {
namespace {

int tree_hops(std::size_t n, bool across_hosts) {
  return across_hosts ? static_cast<int>(std::bit_width(n - 1)) : 1;
}

void flat_tree_transfers(const Hop& hop) {
  for (std::size_t other = 1; other < hop.size(); ++other) {
    if (hop.reducing())
      hop.send(other, 0, hop.range(), TransferKind::kHandOver, hop.held_bytes(other));
    else
      hop.send_result(0, other, hop.range());
  }
}

/// Position p joins p - 2^hop, which makes sums of aligned blocks, as the canonical tree has them. Back
/// in the opposite order.
void tree_transfers(Hop& hop) {
  if (!hop.across_hosts()) return flat_tree_transfers(hop);
  const std::size_t n = hop.size();
  const std::size_t last = static_cast<std::size_t>(tree_hops(n, true)) - 1;
  const std::size_t distance = std::size_t{1} << (hop.reducing() ? hop.number() : last - hop.number());
  for (std::size_t near = 0; near + distance < n; near += 2 * distance) {
    const std::size_t far = near + distance;
    if (hop.reducing())
      hop.send(far, near, hop.range(), TransferKind::kHandOver,
               hop.joint_bytes(far, Range{far, std::min(far + distance, n)}));
    else
      hop.send_result(near, far, hop.range());
  }
}

}  // namespace

constinit const AlgorithmTraits kTreeTraits{
    .letter = 't',
    .name = "tree",
    .description = "everything to the first rank of the group, and back; within a host in one round",
    .hops_text = "2 log2 n, each logarithm rounded up",
    .bytes_text = "up to log2 n arrays",
    .good_for = "small messages; one rank for each host",
    .reducing_phase = Phase::kReduce,
    .complexity = 1,
    .hops = tree_hops,
    .transfers = tree_transfers,
};

}  // namespace multiring
