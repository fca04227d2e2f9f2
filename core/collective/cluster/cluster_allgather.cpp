#include "collective/cluster/cluster_allgather.h"

#include <algorithm>
#include <cstring>

#include "base/arithmetic/kernels/copy.h"
#include "base/cache.h"
#include "collective/cluster/segments.h"

namespace multiring {
namespace {

/// The most ranks of one host that are paired with one of another.
std::size_t most_pairs(std::span<const std::vector<int>> hosts) {
  const auto [least, most] = std::ranges::minmax(hosts, {}, [](const auto& ranks) { return ranks.size(); });
  return (most.size() + least.size() - 1) / least.size();
}

}  // namespace

bool ClusterAllgather::is_worthwhile(const Transport& transport, std::size_t longest) {
  // What staging memory holds goes through it at once.
  return all_hosts_linked(transport) && longest > transport.staging_bytes();
}

ClusterAllgather::ClusterAllgather(Exchange& exchange, const OperationCall& call, StagedCopy::Outgoing own,
                                   std::span<const StagedCopy::Incoming> incoming)
    : exchange_(exchange),
      call_(call),
      hierarchy_(*exchange.transport().hierarchy()),
      hosts_(exchange.transport(), exchange.rank()),
      own_(own),
      incoming_(incoming) {
  section_bytes_ = hierarchy_.staging_bytes() / most_pairs(hosts_.hosts()) / kCacheLine * kCacheLine;
  if (section_bytes_ == 0)
    throw Error(ErrorKind::kUsage, "MULTIRING_STAGING_BYTES is too small for " +
                                       std::to_string(exchange.size()) + " ranks on " +
                                       std::to_string(hosts_.size()) + " hosts");
  segment_bytes_ = std::min(section_bytes_, segments::kMaxGather);
}

void ClusterAllgather::run(std::size_t longest) {
  const auto self = static_cast<std::size_t>(exchange_.rank());
  MessageRing ring(exchange_, call_, hierarchy_, segment_bytes_);
  ring.connect(hosts_.peers());
  if (own_.bytes > 0) std::memmove(incoming_[self].data, own_.data, own_.bytes);
  const std::size_t steps = segment_count(longest, segment_bytes_) * hosts_.size();
  // Every step takes a slot, so what it received is complete after as many steps as there are slots.
  for (std::size_t step = 0; step < steps + ring.slots(); ++step) {
    if (step < steps)
      post(ring, step);
    else if (step == steps)
      ring.finish();
    if (step >= ring.slots()) share_within_host(step - ring.slots());
  }
}

void ClusterAllgather::post(MessageRing& ring, std::size_t step) {
  if (distance(step) == 0) return ring.post(-1, {}, -1, {});
  const int to = hosts_.counterpart(hosts_.after(distance(step)));
  const Range out = segment(step, own_.bytes);
  std::span<const std::byte> sent{own_.data + out.begin, out.size()};
  const std::vector<int> from = hosts_.paired(hosts_.before(distance(step)));
  if (from.empty()) return ring.post(to, sent, -1, {});
  for (const int source : from) {
    const StagedCopy::Incoming& piece = incoming_[static_cast<std::size_t>(source)];
    const Range in = segment(step, piece.bytes);
    ring.post(to, sent, source, {piece.data + in.begin, in.size()});
    sent = {};
  }
}

/// Brings what the ranks of this host have received in a step, or have themselves, to all of them.
void ClusterAllgather::share_within_host(std::size_t step) {
  const std::vector<int>& local_ranks = hosts_.own();
  if (local_ranks.size() == 1) return;
  const auto shared_by = [&](std::size_t local_rank) {
    return distance(step) == 0 ? std::vector<int>{local_ranks[local_rank]}
                               : hosts_.paired(hosts_.before(distance(step)), local_rank);
  };
  const auto for_each = [&](std::size_t local_rank, auto&& visit) {
    std::size_t section = 0;
    for (const int source : shared_by(local_rank)) {
      const StagedCopy::Incoming& piece = incoming_[static_cast<std::size_t>(source)];
      const Range range = segment(step, piece.bytes);
      if (!range.empty()) visit(piece.data + range.begin, section * section_bytes_, range.size());
      ++section;
    }
  };
  std::byte* const staging = hierarchy_.staging(static_cast<int>(hosts_.local_rank()));
  for_each(hosts_.local_rank(), [&](const std::byte* data, std::size_t offset, std::size_t bytes) {
    copy_bytes(staging + offset, data, bytes);
  });
  synchronise_host(exchange_, call_, hierarchy_);
  // Start with the next: the readers of a rank's memory do not all queue for it.
  for (std::size_t ahead = 1; ahead < local_ranks.size(); ++ahead) {
    const std::size_t local_rank = (hosts_.local_rank() + ahead) % local_ranks.size();
    const std::byte* const staged = hierarchy_.staged(static_cast<int>(local_rank));
    for_each(local_rank, [&](std::byte* data, std::size_t offset, std::size_t bytes) {
      copy_bytes(data, staged + offset, bytes);
    });
  }
}

}  // namespace multiring
