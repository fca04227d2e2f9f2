#include "collective/cluster/cluster_reduce_scatter.h"

#include <algorithm>

#include "base/arithmetic/kernels/copy.h"
#include "base/cache.h"
#include "collective/cluster/segments.h"

namespace multiring {

ClusterReduceScatter::ClusterReduceScatter(Exchange& exchange, const OperationCall& call,
                                           const Operation& operation, std::span<const Range> blocks)
    : exchange_(exchange),
      call_(call),
      operation_(operation),
      blocks_(blocks),
      hierarchy_(*exchange.transport().hierarchy()),
      hosts_(exchange.transport(), exchange.rank()),
      sums_(operation.dtype(), operation.reduction(), exchange.size()),
      element_(operation.element_size()) {
  for (const std::vector<int>& host : hosts_.hosts())
    nodes_.push_back(canonical_parts(host, exchange.size()));
  divide();
}

void ClusterReduceScatter::divide() {
  std::size_t most = 0;
  for (const std::vector<int>& host : hosts_.hosts()) most = std::max(most, host.size());
  const std::size_t section = hierarchy_.staging_bytes() / most / kCacheLine * kCacheLine;
  if (section == 0)
    throw Error(ErrorKind::kUsage,
                "MULTIRING_STAGING_BYTES is too small for " + std::to_string(most) + " ranks on a host");
  std::size_t longest = 0;
  for (const Range block : blocks_) longest = std::max(longest, block.size());
  segment_bytes_ = std::min(section, segments::kMaxScatter);
  segments_ = segment_count(longest, segment_bytes_);
  const std::size_t elements = std::min(longest, segment_bytes_) / element_;
  for (const std::vector<Subtree>& nodes : nodes_)
    message_bytes_ = std::max(message_bytes_, bytes_of(nodes, elements));
}

void ClusterReduceScatter::reserve_parts(std::size_t ring_slots) {
  segments_in_flight_ = 1 + (ring_slots + hosts_.size() - 1) / hosts_.size();
  parts_.resize(segments_in_flight_ * hosts_.size() * message_bytes_);
  sent_.resize(message_bytes_);
}

std::size_t ClusterReduceScatter::bytes_of(const std::vector<Subtree>& nodes, std::size_t elements) const {
  std::size_t bytes = 0;
  for (const Subtree node : nodes) bytes += elements * sums_.bytes_per_element(node);
  return bytes;
}

void ClusterReduceScatter::run() {
  MessageRing ring(exchange_, call_, hierarchy_, message_bytes_);
  ring.connect(hosts_.peers());
  reserve_parts(ring.slots());
  const std::size_t steps = segments_ * hosts_.size();
  for (std::size_t step = 0; step < steps; ++step) {
    stage(step);
    post(ring, step);
    // Every step takes a slot of the ring, so what came for so many segments before is complete.
    if (distance(step) + 1 == hosts_.size() && segment(step) + 1 >= segments_in_flight_)
      join(segment(step) + 1 - segments_in_flight_);
  }
  ring.finish();
  for (std::size_t left = segments_ + 1 > segments_in_flight_ ? segments_ + 1 - segments_in_flight_ : 0;
       left < segments_; ++left)
    join(left);
}

/// A section of this rank's staging memory for each rank of the host of the step.
void ClusterReduceScatter::stage(std::size_t step) {
  if (hosts_.own().size() == 1) return;
  std::byte* section = hierarchy_.staging(static_cast<int>(hosts_.local_rank()));
  for (const int rank : hosts_.after(distance(step))) {
    const Range range = segment_of(rank, segment(step));
    if (!range.empty())
      copy_bytes(section, operation_.input + blocks_[static_cast<std::size_t>(rank)].begin + range.begin,
                 range.size());
    section += segment_bytes_;
  }
  synchronise_host(exchange_, call_, hierarchy_);
}

void ClusterReduceScatter::post(MessageRing& ring, std::size_t step) {
  const int self = exchange_.rank();
  if (distance(step) == 0) {
    add_host(self, step, arrived(segment(step), 0));
    return ring.post(-1, {}, -1, {});
  }
  const int from = hosts_.counterpart(hosts_.before(distance(step)));
  const std::size_t from_distance =
      hosts_.size() - distance(step);  // the same host, counted as one after this one
  std::span<std::byte> in{arrived(segment(step), from_distance),
                          bytes_of(nodes_[from_distance], segment_of(self, segment(step)).size() / element_)};
  const std::vector<int> ranks = hosts_.paired(hosts_.after(distance(step)));
  if (ranks.empty()) return ring.post(-1, {}, from, in);
  for (const int rank : ranks) {
    const std::size_t bytes = add_host(rank, step, sent_.data());
    ring.post(rank, {sent_.data(), bytes}, from, in);
    in = {};
  }
}

std::size_t ClusterReduceScatter::add_host(int rank, std::size_t step, std::byte* to) {
  const std::vector<int>& local_ranks = hosts_.own();
  const std::vector<int>& targets = hosts_.after(distance(step));
  const Range range = segment_of(rank, segment(step));
  const auto section = static_cast<std::size_t>(std::ranges::find(targets, rank) - targets.begin());
  std::byte* end = to;
  for (const Subtree node : nodes_[0]) {
    inputs_.clear();
    for (std::size_t local_rank = 0; local_rank < local_ranks.size(); ++local_rank) {
      const int other = local_ranks[local_rank];
      if (other < node.begin || other >= node.end) continue;
      const std::byte* const input =
          local_ranks.size() == 1
              ? operation_.input + blocks_[static_cast<std::size_t>(rank)].begin + range.begin
              : hierarchy_.staged(static_cast<int>(local_rank)) + section * segment_bytes_;
      inputs_.push_back({{other, other + 1}, input});
    }
    sums_.join(inputs_, node, end, range.size() / element_);
    end += range.size() / element_ * sums_.bytes_per_element(node);
  }
  return static_cast<std::size_t>(end - to);
}

/// Adds what all hosts contribute to a segment of this rank's block.
void ClusterReduceScatter::join(std::size_t segment) {
  const Range range = segment_of(exchange_.rank(), segment);
  const std::size_t elements = range.size() / element_;
  inputs_.clear();
  for (std::size_t host = 0; host < hosts_.size(); ++host) {
    const std::byte* at = arrived(segment, host);
    for (const Subtree node : nodes_[host]) {
      inputs_.push_back({node, at});
      at += elements * sums_.bytes_per_element(node);
    }
  }
  std::ranges::sort(inputs_, {}, &Part::node);
  sums_.join(inputs_, {0, exchange_.size()}, operation_.output + range.begin, elements);
}

}  // namespace multiring
