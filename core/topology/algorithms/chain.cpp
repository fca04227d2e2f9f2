// Each chunk's contributions pass along the line of ranks to its owner, from both ends, and its sum back.
// Neighbours only, in canonical order: some links carry several sums of an element (ADR 27).

#include "topology/algorithms/hop.h"

namespace multiring {
namespace {

void chain_results(const Hop& hop) {
  for (std::size_t chunk = hop.owners().begin; chunk < hop.owners().end; ++chunk) {
    const Range range = hop.share(chunk);
    if (const std::size_t up = chunk + hop.number(); up + 1 < hop.size()) hop.send_result(up, up + 1, range);
    if (chunk > hop.number()) hop.send_result(chunk - hop.number(), chunk - hop.number() - 1, range);
  }
}

/// In hop h the chunks beyond position h leave it upwards, and those before position n - 1 - h leave that
/// downwards, with all that has come to it. Then every chunk's sum passes from its owner to both ends.
void chain_transfers(Hop& hop) {
  if (!hop.reducing()) return chain_results(hop);
  const std::size_t up = hop.number();
  const std::size_t down = hop.size() - 1 - hop.number();
  const std::size_t up_bytes = hop.joint_bytes(up, Range{0, up + 1});
  const std::size_t down_bytes = hop.joint_bytes(down, Range{down, hop.size()});
  for (std::size_t chunk = hop.owners().begin; chunk < hop.owners().end; ++chunk) {
    const Range range = hop.share(chunk);
    if (chunk > up) hop.send(up, up + 1, range, TransferKind::kHandOver, up_bytes);
    if (chunk < down) hop.send(down, down - 1, range, TransferKind::kHandOver, down_bytes);
  }
}

}  // namespace

constinit const AlgorithmTraits kChainTraits{
    .letter = 'c',
    .name = "chain",
    .description =
        "along the line of hosts to the owner of a chunk from both ends, and back; some links carry "
        "several sums of an element ([ADR 27](adr/0027-chains-keep-the-canonical-order.md))",
    .hops_text = "2 (n - 1)",
    .bytes_text = "more than a ring, to two neighbours",
    .good_for = "hosts that reach their neighbours only, in canonical order",
    .reducing_phase = Phase::kReduceScatter,
    .complexity = 3,
    .candidate = Candidate::kAmongNeighbours,
    .by_chunk = ByChunk::kRounding,
    .hops = [](std::size_t n, bool) { return static_cast<int>(n) - 1; },
    .transfers = chain_transfers,
};

}  // namespace multiring
