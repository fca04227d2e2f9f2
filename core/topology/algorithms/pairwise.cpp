// The bytes of a ring in one hop instead of n - 1. Owners add in canonical order, for all has come to them.

#include "topology/algorithms/hop.h"

namespace multiring {
namespace {

void pairwise_transfers(Hop& hop) {
  const Range all{0, hop.size()};
  const Range senders = hop.reducing() ? all : hop.owners();
  const Range receivers = hop.reducing() ? hop.owners() : all;
  for (std::size_t from = senders.begin; from < senders.end; ++from) {
    for (std::size_t to = receivers.begin; to < receivers.end; ++to) {
      if (from == to) continue;
      if (hop.reducing())
        hop.send(from, to, hop.share(to), TransferKind::kHandOver, hop.held_bytes(from));
      else
        hop.send_result(from, to, hop.share(from));
    }
  }
}

}  // namespace

constinit const AlgorithmTraits kPairwiseTraits{
    .letter = 'p',
    .name = "pairwise exchange",
    .description = "every owner of a chunk gets what all others have of it, adds, and sends the sum to all",
    .hops_text = "2",
    .bytes_text = "2 (n - 1) / n of an array",
    .good_for = "large messages",
    .reducing_phase = Phase::kReduceScatter,
    .complexity = 0,
    .hops = [](std::size_t, bool) { return 1; },
    .transfers = pairwise_transfers,
};

}  // namespace multiring
