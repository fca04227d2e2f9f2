#include "collective/plan/host_table.h"

#include <algorithm>
#include <limits>
#include <ranges>

#include "base/cache.h"
#include "base/error.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

constexpr std::size_t kAnySize = std::numeric_limits<std::size_t>::max();

/// The first of the sizes [0, end) for which `is_so`, which is so for all larger ones; or `end`.
template <class Predicate>
std::size_t first_size(std::size_t end, const Predicate& is_so) {
  const auto sizes = std::views::iota(std::size_t{0}, end);
  return static_cast<std::size_t>(
      std::ranges::partition_point(sizes, [&](std::size_t size) { return !is_so(size); }) - sizes.begin());
}

}  // namespace

std::uint16_t HostChoice::hash() const {
  std::uint64_t hash = max_rounds * 0x9E3779B97F4A7C15ULL ^ min_direct * 0xC2B2AE3D27D4EB4FULL;
  hash ^= hash >> 32U;
  return static_cast<std::uint16_t>((hash ^ hash >> 16U) | 1U);
}

HostTable::HostTable(int ranks, HostMemory memory, double rank_bytes_per_second, std::size_t staging_bytes)
    : ranks_(ranks),
      memory_(memory),
      rank_bytes_per_second_(rank_bytes_per_second),
      staging_bytes_(staging_bytes / kCacheLine * kCacheLine) {
  if (ranks < 2) throw_usage("a rank alone needs no algorithm");
  if (staging_bytes_ == 0) throw_usage("rounds need staging memory of a cache line");
}

/// A rank reads and writes in
///   rounds   its array and its staging memory; those of all, and the sum;
///   direct   a slice of all arrays, and of all results;
///   staged   all slices but its own on the way to staging memory, and back; and as direct.
AlgorithmRow HostTable::row(Kind kind, std::size_t bytes) const {
  AlgorithmRow row;
  row.name = algorithm_name({kind});
  const auto array = static_cast<double>(bytes);
  double touched = 2.0 * array;
  std::size_t synchronisations = 2;
  if (kind == Kind::kRounds) {
    row.segments = std::max<std::size_t>(segment_count(bytes, staging_bytes_), 1);
    touched = (2.0 + ranks_ + 1.0) * array;
    synchronisations = row.segments;
    if (row.segments > 1) row.excluded = "more than staging memory holds";
  } else if (kind == Kind::kStaged) {
    row.segments = std::max<std::size_t>(segment_count(bytes, staging_bytes_), 1);
    touched += 4.0 * array * (ranks_ - 1.0) / ranks_;
    synchronisations = row.segments + 1;
  } else {
    row.needs = "arrays in symmetric memory";
    if (bytes < kMinSymmetricBytes) row.excluded = "so few bytes are always staged";
  }
  row.seconds = static_cast<double>(synchronisations) * memory_.latency +
                std::max(touched / rank_bytes_per_second_, touched * ranks_ / memory_.bytes_per_second);
  return row;
}

std::vector<AlgorithmRow> HostTable::rows(std::size_t bytes) const {
  std::vector<AlgorithmRow> rows;
  for (const Kind kind : {Kind::kRounds, Kind::kDirect, Kind::kStaged}) rows.push_back(row(kind, bytes));
  const auto choose = [&](bool symmetric) {
    auto applicable = rows | std::views::filter([&](const AlgorithmRow& row) {
                        return row.excluded.empty() && (symmetric || row.needs.empty());
                      });
    simplest_quick(applicable).is_chosen = true;
  };
  choose(false);
  choose(true);
  for (AlgorithmRow& row : rows) row.is_compared = row.excluded.empty();
  return rows;
}

bool HostTable::chooses(Kind kind, std::size_t bytes) const {
  const std::vector<AlgorithmRow> found = rows(bytes);
  return std::ranges::find(found, algorithm_name({kind}), &AlgorithmRow::name)->is_chosen;
}

HostChoice HostTable::choice() const {
  HostChoice found;
  // Rounds add more for each byte, so that they are quickest up to some size; direct from some size on.
  const std::size_t staged =
      first_size(staging_bytes_ + 1, [&](std::size_t bytes) { return chooses(Kind::kStaged, bytes); });
  found.max_rounds = staged > 0 ? staged - 1 : 0;
  found.min_direct =
      first_size(staging_bytes_ + 1, [&](std::size_t bytes) { return chooses(Kind::kDirect, bytes); });
  return found;
}

HostChoice forced_choice(CrossingAlgorithm::Kind kind) {
  if (kind == CrossingAlgorithm::Kind::kRounds) return {kAnySize, kAnySize};
  return {0, kind == CrossingAlgorithm::Kind::kDirect ? kMinSymmetricBytes : kAnySize};
}

}  // namespace multiring
