#include "collective/plan/message_load.h"

#include <algorithm>

#include "base/cache.h"
#include "collective/cluster/message_segments.h"
#include "topology/chunks.h"
#include "transport/hierarchy.h"

namespace multiring {
namespace {

/// Whether a rank has a piece for another.
bool has_piece(Collective collective, std::size_t from, std::size_t to) {
  if (from == to) return false;
  if (collective == Collective::kGather) return to == 0;
  if (collective == Collective::kScatter) return from == 0;
  return true;
}

}  // namespace

MessageLoad::MessageLoad(const Cluster& cluster, Collective collective) : hosts_(cluster.hosts.size()) {
  const std::vector<int> host_of = cluster.host_of_rank();
  const auto size = host_of.size();
  struct RankPieces {
    std::size_t sent = 0;
    std::size_t received = 0;
    std::size_t within = 0;
  };
  std::vector<RankPieces> ranks(size);
  for (std::size_t from = 0; from < size; ++from) {
    for (std::size_t to = 0; to < size; ++to) {
      if (!has_piece(collective, from, to)) continue;
      HostPieces& sender = hosts_[static_cast<std::size_t>(host_of[from])];
      if (host_of[from] == host_of[to]) {
        ++sender.within;
        ++ranks[from].within;
        ++ranks[to].within;
        continue;
      }
      ++sender.sent;
      ++ranks[from].sent;
      ++hosts_[static_cast<std::size_t>(host_of[to])].received;
      ++ranks[to].received;
    }
  }
  for (const RankPieces& rank : ranks) {
    rank_sent_ = std::max(rank_sent_, rank.sent);
    rank_messages_ = std::max({rank_messages_, rank.sent, rank.received});
    rank_crossing_ = std::max(rank_crossing_, rank.sent + rank.received);
    rank_within_ = std::max(rank_within_, rank.within);
  }
}

double MessageLoad::seconds(std::size_t piece, std::size_t staging_bytes, const Cluster& cluster,
                            const CostModel& model) const {
  const auto bytes = static_cast<double>(piece);
  const auto bytes_of = [&](std::size_t pieces) { return bytes * static_cast<double>(pieces); };
  const std::size_t segments = segment_count(piece, message_segment_bytes(staging_bytes));
  const auto messages = static_cast<double>(std::max<std::size_t>(segments, 1));
  // Each piece is read and written where it is sent and where it is received: of one that crosses while
  // others are on their way.
  double sending = std::max(static_cast<double>(rank_messages_) * messages * model.message_seconds,
                            2.0 * bytes_of(rank_crossing_) / model.reduction_bytes_per_second);
  double within = 2.0 * bytes_of(rank_within_) / model.reduction_bytes_per_second;
  double synchronising = 0.0;
  std::size_t all_sent = 0;
  for (std::size_t number = 0; number < hosts_.size(); ++number) {
    const HostPieces& pieces = hosts_[number];
    const Host& host = cluster.hosts[number];
    sending =
        std::max({sending, bytes_of(std::max(pieces.sent, pieces.received)) / crossing_speed(host, model),
                  static_cast<double>(pieces.sent) * messages * model.interface_message_seconds,
                  2.0 * bytes_of(pieces.sent + pieces.received) / host.memory.bytes_per_second});
    all_sent += pieces.sent;
    if (pieces.within == 0) continue;
    within = std::max(within, 4.0 * bytes_of(pieces.within) / host.memory.bytes_per_second);
    const std::size_t section = hierarchy_staging_bytes(staging_bytes) / host.ranks.size();
    const std::size_t rounds = segment_count(piece, std::max(section, kCacheLine));
    synchronising = std::max(synchronising, static_cast<double>(rounds) * host.memory.latency);
  }
  return crossing_latency(cluster, model) + sending + within + synchronising +
         static_cast<double>(all_sent) * messages * model.shared_message_seconds +
         bytes_of(all_sent) / model.shared_bytes_per_second;
}

}  // namespace multiring
