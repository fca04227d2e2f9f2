#include "collective/plan/message_load.h"

#include <algorithm>

#include "base/cache.h"
#include "collective/cluster/message_segments.h"
#include "topology/chunks.h"
#include "transport/hierarchy.h"

namespace multiring {
MessageLoad::MessageLoad(const Cluster& cluster, Collective collective)
    : is_alltoall_(collective == Collective::kAlltoall) {
  const auto size = static_cast<std::size_t>(cluster.size());
  for (const Host& host : cluster.hosts) {
    const std::size_t here = host.ranks.size();
    const std::size_t elsewhere = size - here;
    const bool has_root = std::ranges::find(host.ranks, 0) != host.ranks.end();
    if (is_alltoall_)
      add({here * elsewhere, here * elsewhere, here * (here - 1)}, elsewhere, elsewhere, 2 * (here - 1));
    else if (collective == Collective::kGather)
      has_root ? add({0, elsewhere, here - 1}, 0, elsewhere, here - 1) : add({here, 0, 0}, 1, 0, 0);
    else
      has_root ? add({elsewhere, 0, here - 1}, elsewhere, 0, here - 1) : add({0, here, 0}, 0, 1, 0);
  }
}

void MessageLoad::add(const HostPieces& host, std::size_t rank_sent, std::size_t rank_received,
                      std::size_t rank_within) {
  hosts_.push_back(host);
  rank_sent_ = std::max(rank_sent_, rank_sent);
  rank_messages_ = std::max({rank_messages_, rank_sent, rank_received});
  rank_crossing_ = std::max(rank_crossing_, rank_sent + rank_received);
  rank_within_ = std::max(rank_within_, rank_within);
}

double MessageLoad::seconds(std::size_t piece, std::size_t staging_bytes, const Cluster& cluster,
                            const CostModel& model) const {
  const auto bytes = static_cast<double>(piece);
  const auto bytes_of = [&](std::size_t pieces) { return bytes * static_cast<double>(pieces); };
  const std::size_t segment = message_segment_bytes(staging_bytes);
  const std::size_t segments = std::max<std::size_t>(segment_count(piece, segment), 1);
  const auto messages = static_cast<double>(segments);
  // In an alltoall a message waits for the one that a peer has sent so many messages before.
  const std::size_t waits =
      is_alltoall_ ? segment_count(rank_messages_ * segments, message_slots(segment)) : 1;
  const double first = crossing_latency(cluster, model);
  // Each piece is read and written where it is sent, and where it is received. For those that cross hosts
  // that overlaps with sending.
  double sending = std::max(static_cast<double>(rank_messages_) * messages * model.message_seconds,
                            2.0 * bytes_of(rank_crossing_) / model.reduction_bytes_per_second);
  double within = 2.0 * bytes_of(rank_within_) / model.reduction_bytes_per_second;
  double synchronising = 0.0;
  std::size_t all_sent = 0;
  for (std::size_t number = 0; number < hosts_.size(); ++number) {
    const HostPieces& pieces = hosts_[number];
    const Host& host = cluster.hosts[number];
    const double crossing = bytes_of(std::max(pieces.sent, pieces.received));
    sending = std::max({sending, crossing * model.beyond_burst(crossing) / crossing_speed(host, model),
                        static_cast<double>(std::max(pieces.sent, pieces.received)) * messages *
                            model.interface_message_seconds,
                        2.0 * bytes_of(pieces.sent + pieces.received) / host.memory.bytes_per_second});
    all_sent += pieces.sent;
    if (pieces.within == 0) continue;
    within = std::max(within, 4.0 * bytes_of(pieces.within) / host.memory.bytes_per_second);
    const std::size_t section = hierarchy_staging_bytes(staging_bytes) / host.ranks.size();
    const std::size_t rounds = segment_count(piece, std::max(section, kCacheLine));
    synchronising = std::max(synchronising, static_cast<double>(rounds) * host.memory.latency);
  }
  return std::max(static_cast<double>(waits) * first, first + sending) + within + synchronising +
         static_cast<double>(all_sent) * messages * model.shared_message_seconds +
         bytes_of(all_sent) / model.shared_bytes_per_second;
}

}  // namespace multiring
