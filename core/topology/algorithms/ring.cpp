// Reduce-scatter and all-gather around a ring. A ring sends what the pairwise exchange sends in more hops,
// but to one neighbour only; it pays among many hosts. It adds in the order of the ring, which differs by
// chunk.

#include "topology/algorithms/hop.h"

namespace multiring {
namespace {

/// Chunk c starts at position c + 1 and has come round to its owner c after n - 1 hops; then it starts
/// there and goes round once more. Backwards, positions count from the other end.
void ring_transfers(Hop& hop) {
  const std::size_t n = hop.size();
  const auto position = [&](std::size_t step) { return hop.backward() ? n - 1 - step : step; };
  for (std::size_t chunk = hop.owners().begin; chunk < hop.owners().end; ++chunk) {
    const std::size_t step = position(chunk) + hop.number() + (hop.reducing() ? 1 : 0);
    const std::size_t from = position(step % n);
    const std::size_t to = position((step + 1) % n);
    if (hop.reducing())
      hop.send(from, to, hop.share(chunk), TransferKind::kHandOver,
               hop.number() == 0 ? hop.held_bytes(from) : hop.partial_bytes());
    else
      hop.send_result(from, to, hop.share(chunk));
  }
}

}  // namespace

constinit const AlgorithmTraits kRingTraits{
    .letter = 'r',
    .name = "ring",
    .description = "the same bytes, to one neighbour only; of more than two ranks with `--order any`",
    .hops_text = "2 (n - 1)",
    .bytes_text = "2 (n - 1) / n of an array, to two neighbours",
    .good_for = "hosts that reach their neighbours only, and many hosts",
    .reducing_phase = Phase::kReduceScatter,
    .complexity = 4,
    .candidate = Candidate::kAcrossHosts,
    .by_chunk = ByChunk::kOrder,
    .both_directions = true,
    .hops = [](std::size_t n, bool) { return static_cast<int>(n) - 1; },
    .transfers = ring_transfers,
};

}  // namespace multiring
