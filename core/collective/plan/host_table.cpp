#include "collective/plan/host_table.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <ranges>
#include <string>

#include "base/cache.h"
#include "base/error.h"
#include "collective/staged/sections.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

constexpr std::size_t kAnySize = std::numeric_limits<std::size_t>::max();

/// The first of all sizes for which `is_so`, which is so for all larger ones; or kAnySize.
template <class Predicate>
std::size_t first_size(const Predicate& is_so) {
  constexpr std::size_t kMaxBytes = std::size_t{1} << 40;
  const auto sizes = std::views::iota(std::size_t{0}, kMaxBytes);
  const auto found = std::ranges::partition_point(sizes, [&](std::size_t size) { return !is_so(size); });
  return found == sizes.end() ? kAnySize : *found;
}

/// The simplest first.
std::span<const CrossingAlgorithm::Kind> kinds_of(Collective collective) {
  using enum CrossingAlgorithm::Kind;
  static constexpr CrossingAlgorithm::Kind kAll[] = {kRounds, kDirect, kStaged};
  return collective == Collective::kAllreduce ? std::span(kAll) : std::span(kAll).subspan(1);
}

}  // namespace

std::uint16_t HostChoice::hash() const {
  std::uint64_t hash = max_rounds * 0x9E3779B97F4A7C15ULL ^ min_direct * 0xC2B2AE3D27D4EB4FULL;
  hash ^= hash >> 32U;
  return static_cast<std::uint16_t>((hash ^ hash >> 16U) | 1U);
}

HostTable::HostTable(Collective collective, int ranks, HostMemory memory, std::size_t staging_bytes)
    : collective_(collective),
      ranks_(ranks),
      memory_(memory),
      staging_bytes_(staging_bytes / kCacheLine * kCacheLine) {
  const std::string name = collective_name(collective);
  if (!adds(collective))
    throw_usage(name +
                " has no choice of algorithms on one host, where it passes through shared memory; of " +
                "several (--hosts 2x4) it has");
  if (ranks < 2) throw_usage(name + " of a rank alone needs no algorithm; describe several (--hosts 1x2)");
  if (staging_bytes_ == 0) throw_usage("rounds need staging memory of a cache line");
}

/// A rank reads and writes in an allreduce
///   rounds   its array and its staging memory, which all others have read; those of all, and the sum;
///   direct   a slice of all arrays, and of all results;
///   staged   all slices but its own on the way to staging memory, and back; and as direct;
/// and in a reduce-scatter
///   direct   its block of all arrays, and of the sum;
///   staged   its array and its staging memory; and as direct.
AlgorithmRow HostTable::row(Kind kind, std::size_t bytes) const {
  const bool is_allreduce = collective_ == Collective::kAllreduce;
  AlgorithmRow row;
  row.name = algorithm_name({kind});
  row.is_compared = true;
  const auto array = static_cast<double>(bytes);
  double touched = is_allreduce ? 2.0 * array : array + array / ranks_;
  std::size_t synchronisations = 2;
  if (kind != Kind::kDirect) {
    const auto ranks = static_cast<std::size_t>(ranks_);
    const std::size_t segments =
        is_allreduce ? segment_count(bytes, staging_bytes_)
                     : Sections(staging_bytes_, ranks, (bytes + ranks - 1) / ranks).segments();
    row.segments = std::max<std::size_t>(segments, 1);
    synchronisations = row.segments + (kind == Kind::kStaged && is_allreduce ? 1 : 0);
    if (kind == Kind::kRounds)
      touched = (2.0 + memory_.rewriting + ranks_ + 1.0) * array;
    else
      touched += is_allreduce ? 4.0 * array * (ranks_ - 1.0) / ranks_ : 2.0 * array;
  } else {
    row.needs = "arrays in symmetric memory";
    if (bytes < kMinSymmetricBytes) {
      row.excluded = "so few bytes are not looked for in symmetric memory";
      row.is_compared = false;
    }
  }
  row.seconds = static_cast<double>(synchronisations) * memory_.latency +
                touched * std::max(ranks_, 2.0) / memory_.bytes_per_second;
  return row;
}

std::vector<AlgorithmRow> HostTable::rows(std::size_t bytes, const HostChoice& choice, Order order,
                                          NcclScope nccl) const {
  std::vector<AlgorithmRow> rows;
  const std::span<const Kind> kinds = kinds_of(collective_);
  const bool in_rounds = bytes <= choice.max_rounds && std::ranges::find(kinds, Kind::kRounds) != kinds.end();
  for (const Kind kind : kinds) {
    rows.push_back(row(kind, bytes));
    rows.back().is_chosen =
        kind == Kind::kDirect ? bytes >= choice.min_direct : (kind == Kind::kRounds) == in_rounds;
  }
  const bool by_nccl = order == Order::kAny && nccl != NcclScope::kOff;
  rows.emplace_back().name = algorithm_name({by_nccl ? Kind::kNccl : Kind::kPeers});
  rows.back().excluded = by_nccl ? "for arrays on GPUs, one for each rank, by NCCL: not predicted"
                                 : "for arrays on GPUs, with MULTIRING_PEER_MEMORY=1: not predicted";
  return rows;
}

bool HostTable::is_quickest(Kind kind, std::span<const Kind> kinds, std::size_t bytes) const {
  std::vector<AlgorithmRow> compared;
  for (const Kind each : kinds) compared.push_back(row(each, bytes));
  return simplest_quick(compared).name == algorithm_name({kind});
}

HostChoice HostTable::choice() const {
  HostChoice found;
  // Rounds add more for each byte, so that they are quickest up to some size; direct from some size on.
  const std::span<const Kind> all = kinds_of(collective_);
  std::vector<Kind> ordinary;
  std::ranges::remove_copy(all, std::back_inserter(ordinary), Kind::kDirect);
  const std::size_t staged =
      first_size([&](std::size_t bytes) { return is_quickest(Kind::kStaged, ordinary, bytes); });
  found.max_rounds = staged > 0 ? staged - 1 : 0;
  found.min_direct = first_size([&](std::size_t bytes) {
    return bytes >= kMinSymmetricBytes && is_quickest(Kind::kDirect, all, bytes);
  });
  return found;
}

HostChoice forced_choice(CrossingAlgorithm::Kind kind) {
  if (kind == CrossingAlgorithm::Kind::kRounds) return {kAnySize, kAnySize};
  return {0, kind == CrossingAlgorithm::Kind::kDirect ? kMinSymmetricBytes : kAnySize};
}

}  // namespace multiring
