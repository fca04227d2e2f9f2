#include "collective/cluster/cluster_broadcast.h"

#include <algorithm>

#include "base/arithmetic/kernels/copy.h"
#include "base/cache.h"
#include "collective/cluster/host_ranks.h"
#include "collective/cluster/segments.h"

namespace multiring {

bool ClusterBroadcast::is_worthwhile(const Transport& transport, std::size_t bytes) {
  if (!all_hosts_linked(transport)) return false;
  const std::size_t hosts = ranks_by_host(transport).size();
  return hosts > 2 && bytes > std::min(segments::kChainFrom, transport.staging_bytes()) * hosts;
}

ClusterBroadcast::ClusterBroadcast(Exchange& exchange, const OperationCall& call, const Operation& operation)
    : exchange_(exchange), call_(call), operation_(operation), hierarchy_(*exchange.transport().hierarchy()) {
  const int root = operation.descriptor.key.root;
  const HostRing hosts(exchange.transport(), root);
  for (const std::vector<int>& ranks : hosts.hosts()) {
    if (ranks[0] == hierarchy_.host_ranks()[0]) chain_index_ = chain_.size();
    // Roots with different local ranks keep different ranks busy.
    chain_.push_back(hosts.counterpart(ranks));
  }
  const std::size_t bytes = operation.descriptor.bytes;
  const std::size_t most = std::min(segments::kMaxBroadcast, exchange.transport().staging_bytes());
  const std::size_t wanted =
      bytes / (segments::kBroadcastCountPerHost * hosts.size()) / kCacheLine * kCacheLine;
  segment_bytes_ = std::clamp(wanted, std::min(segments::kMinBroadcast, most), most);
  segments_ = segment_count(bytes, segment_bytes_);
}

void ClusterBroadcast::run() {
  if (chain_[chain_index_] == exchange_.rank()) return forward();
  for (std::size_t index = 0; index < segments_; ++index) share_within_host(index, nullptr);
}

void ClusterBroadcast::forward() {
  const int before = chain_index_ > 0 ? chain_[chain_index_ - 1] : -1;
  const int after = chain_index_ + 1 < chain_.size() ? chain_[chain_index_ + 1] : -1;
  std::vector<int> peers;
  for (const int peer : {before, after})
    if (peer >= 0) peers.push_back(peer);
  MessageRing ring(exchange_, call_, hierarchy_, segment_bytes_);
  ring.connect(peers);
  // A slot of the ring is complete when every slot has been posted once more.
  const std::size_t lag = before >= 0 ? ring.slots() : 0;
  for (std::size_t step = 0; step < segments_ + lag; ++step) {
    const Range coming = before >= 0 ? segment(step) : Range{};
    const bool forwards = step >= lag;
    const Range going = forwards && after >= 0 ? segment(step - lag) : Range{};
    const std::byte* const held = before >= 0 ? operation_.output : operation_.input;
    ring.post(after, {held + going.begin, going.size()}, before,
              {operation_.output + coming.begin, coming.size()});
    if (forwards) share_within_host(step - lag, held);
  }
  ring.finish();
}

void ClusterBroadcast::share_within_host(std::size_t index, const std::byte* held) {
  const std::span<const int> local_ranks = hierarchy_.host_ranks();
  if (local_ranks.size() == 1) return;
  const auto local_rank_of = [&](int rank) {
    return static_cast<int>(std::ranges::find(local_ranks, rank) - local_ranks.begin());
  };
  const Range range = segment(index);
  if (held != nullptr)
    copy_bytes(hierarchy_.staging(local_rank_of(exchange_.rank())), held + range.begin, range.size());
  synchronise_host(exchange_, call_, hierarchy_);
  if (held == nullptr)
    copy_bytes(operation_.output + range.begin, hierarchy_.staged(local_rank_of(chain_[chain_index_])),
               range.size());
}

}  // namespace multiring
