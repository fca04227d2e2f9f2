#include "collective/cluster/broadcast.h"

#include <algorithm>
#include <cstring>

#include "collective/cluster/host_ranks.h"

namespace multiring {
namespace {

// For each host. Estimated, not measured: below, a round to all hosts at once is over before a chain has been
// passed.
constexpr std::size_t kChainFrom = 64 * 1024;
constexpr std::size_t kLeastSegment = 16 * 1024;
constexpr std::size_t kMostSegment = 256 * 1024;
// The last host has the first segment when the others have been passed once. With so many segments for each
// host that is a part of the time.
constexpr std::size_t kSegmentsPerHost = 8;
constexpr std::size_t kCacheLine = 64;

}  // namespace

bool ClusterBroadcast::pays(const Transport& transport, std::size_t bytes) {
  if (transport.shares_memory()) return false;
  const std::size_t hosts = ranks_by_host(transport).size();
  return hosts > 2 && bytes > std::min(kChainFrom, transport.staging_bytes()) * hosts;
}

ClusterBroadcast::ClusterBroadcast(Exchange& exchange, const Call& call, const Operation& operation)
    : exchange_(exchange), call_(call), operation_(operation), hierarchy_(*exchange.transport().hierarchy()) {
  const int root = operation.descriptor.key.root;
  const HostRing hosts(exchange.transport(), root);
  for (const std::vector<int>& ranks : hosts.hosts()) {
    if (ranks[0] == hierarchy_.host_ranks()[0]) link_ = chain_.size();
    // Roots that stand differently on their hosts keep different ranks busy.
    chain_.push_back(hosts.counterpart(ranks));
  }
  const std::size_t bytes = operation.descriptor.bytes;
  const std::size_t most = std::min(kMostSegment, exchange.transport().staging_bytes());
  const std::size_t wanted = bytes / (kSegmentsPerHost * hosts.size()) / kCacheLine * kCacheLine;
  segment_bytes_ = std::clamp(wanted, std::min(kLeastSegment, most), most);
  segments_ = segment_count(bytes, segment_bytes_);
}

void ClusterBroadcast::run() {
  if (chain_[link_] == exchange_.rank()) return pass_on();
  for (std::size_t index = 0; index < segments_; ++index) show(index, nullptr);
}

void ClusterBroadcast::pass_on() {
  const int before = link_ > 0 ? chain_[link_ - 1] : -1;
  const int after = link_ + 1 < chain_.size() ? chain_[link_ + 1] : -1;
  std::vector<int> peers;
  for (const int peer : {before, after})
    if (peer >= 0) peers.push_back(peer);
  MessageRing ring(exchange_, call_, hierarchy_, segment_bytes_);
  ring.connect(peers);
  // What a place in the ring has received is there when as many more have been posted as there are places.
  const std::size_t lag = before >= 0 ? ring.places() : 0;
  for (std::size_t turn = 0; turn < segments_ + lag; ++turn) {
    const Range coming = before >= 0 ? segment(turn) : Range{};
    const bool passes = turn >= lag;
    const Range going = passes && after >= 0 ? segment(turn - lag) : Range{};
    const std::byte* const held = before >= 0 ? operation_.output : operation_.input;
    ring.post(after, {held + going.begin, going.size()}, before,
              {operation_.output + coming.begin, coming.size()});
    if (passes) show(turn - lag, held);
  }
  ring.finish();
}

void ClusterBroadcast::show(std::size_t index, const std::byte* held) {
  const std::span<const int> mates = hierarchy_.host_ranks();
  if (mates.size() == 1) return;
  const auto place_of = [&](int rank) {
    return static_cast<int>(std::ranges::find(mates, rank) - mates.begin());
  };
  const Range range = segment(index);
  if (held != nullptr)
    std::memcpy(hierarchy_.staging(place_of(exchange_.rank())), held + range.begin, range.size());
  meet_mates(exchange_, call_, hierarchy_);
  if (held == nullptr)
    std::memcpy(operation_.output + range.begin, hierarchy_.staged(place_of(chain_[link_])), range.size());
}

}  // namespace multiring
