// Partners at distance 1, 2, 4, ... exchange all they have.

#include <bit>
#include <vector>

#include "topology/algorithms/hop.h"

namespace multiring {
namespace {

int doubling_hops(std::size_t n, bool) {
  const std::size_t core = std::bit_floor(n);
  return static_cast<int>(std::bit_width(core)) - 1 + (core < n ? 2 : 0);
}

/// Positions beyond the largest power of two join one within it before, and get the sum from it afterwards.
void doubling_transfers(Hop& hop) {
  const std::size_t core = std::bit_floor(hop.size());
  const std::size_t extra = hop.size() - core;
  const auto last = static_cast<std::size_t>(doubling_hops(hop.size(), true)) - 1;
  if (extra > 0 && hop.number() == 0) {
    for (std::size_t position = 0; position < extra; ++position)
      hop.send(core + position, position, hop.range(), TransferKind::kHandOver,
               hop.held_bytes(core + position));
    return;
  }
  if (extra > 0 && hop.number() == last) {
    for (std::size_t position = 0; position < extra; ++position)
      hop.send_result(position, core + position, hop.range());
    return;
  }
  const std::size_t distance = std::size_t{1} << (extra > 0 ? hop.number() - 1 : hop.number());
  for (std::size_t from = 0; from < core; ++from) {
    std::vector<std::size_t> joined;
    const std::size_t block = from / distance * distance;
    for (std::size_t position = block; position < block + distance; ++position) {
      joined.push_back(position);
      if (position < extra) joined.push_back(core + position);
    }
    hop.send(from, from ^ distance, hop.range(), TransferKind::kExchange, hop.joint_bytes(from, joined));
  }
}

}  // namespace

constinit const AlgorithmTraits kDoublingTraits{
    .letter = 'd',
    .name = "recursive doubling",
    .description =
        "all ranks exchange everything with partners at distance 1, 2, 4, ...; last dimension only",
    .hops_text = "log2 n rounded down, and 2 more unless n is a power of two",
    .bytes_text = "log2 n arrays",
    .good_for = "small messages",
    .reducing_phase = Phase::kAllreduce,
    .complexity = 2,
    .hops = doubling_hops,
    .transfers = doubling_transfers,
};

}  // namespace multiring
