#include "collective/plan/crossing_algorithm.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <utility>

#include "base/cache.h"
#include "base/error.h"
#include "collective/descriptor.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

// Fewer bytes should not be worth the messages of another segment. With so many segments several are in
// flight most of the time.
constexpr std::size_t kMinSegment = 128 * 1024;
constexpr std::size_t kSegments = 4;
using Kind = CrossingAlgorithm::Kind;
constexpr std::string_view kAllreduceOf = "allreduce:";
// Of algorithms that have no mode.
constexpr std::pair<Kind, std::string_view> kNames[] = {{Kind::kRounds, "rounds"},
                                                        {Kind::kMessages, "messages"},
                                                        {Kind::kDirect, "direct"},
                                                        {Kind::kStaged, "staged"}};
constexpr std::size_t kMaxBytes = std::size_t{1} << 62;

/// At most `most`, about `wanted`, and all of about the same length.
std::size_t segment_bytes(std::size_t bytes, std::size_t most, std::size_t wanted) {
  std::size_t segment = wanted > 0
                            ? std::clamp(round_up(wanted, kCacheLine), std::min(kCacheLine, most), most)
                            : std::clamp(bytes / kSegments, std::min(kMinSegment, most), most);
  const std::size_t count = segment_count(bytes, segment);
  segment = round_up((bytes + count - 1) / count, kCacheLine);
  return std::min({segment, most, bytes});
}

}  // namespace

std::size_t parse_bytes(std::string_view text) {
  std::size_t bytes = 0;
  const char* const end = text.data() + text.size();
  auto [rest, error] = std::from_chars(text.data(), end, bytes);
  constexpr std::string_view kUnits = "KMG";
  if (error == std::errc() && rest + 1 == end && kUnits.find(*rest) != std::string_view::npos) {
    const std::size_t shift = 10 * (kUnits.find(*rest) + 1);
    if (bytes <= kMaxBytes >> shift) return bytes << shift;
  }
  if (error != std::errc() || rest != end || bytes > kMaxBytes)
    throw_usage("'" + std::string(text) + "' is not a number of bytes, such as 4096, 64K or 1M");
  return bytes;
}

CrossingAlgorithm parse_algorithm(std::string_view text) {
  const std::size_t slash = std::min(text.find('/'), text.size());
  std::string_view name = text.substr(0, slash);
  CrossingAlgorithm algorithm;
  for (const auto& [kind, word] : kNames) {
    if (name != word) continue;
    algorithm.kind = kind;
    if (slash == text.size()) return algorithm;
    throw_usage("'" + std::string(text) + "' gives " + std::string(name) + " a segment, which have none");
  }
  if (name.starts_with(kAllreduceOf)) {
    algorithm.kind = Kind::kAllreducePlan;
    name.remove_prefix(kAllreduceOf.size());
  }
  try {
    algorithm.mode = parse_mode(name);
  } catch (const Error& error) {
    throw_usage(std::string(error.what()) +
                "; or rounds, within a host also direct or staged, or in a rule for gather, scatter or "
                "alltoall messages");
  }
  if (slash == text.size()) return algorithm;
  algorithm.segment = parse_bytes(text.substr(slash + 1));
  if (algorithm.segment == 0) throw_usage("'" + std::string(text) + "' has a segment of no bytes");
  return algorithm;
}

void require_runs(const CrossingAlgorithm& algorithm, Collective collective) {
  const std::string name = algorithm_name(algorithm);
  if (algorithm.kind == Kind::kAllreducePlan && collective != Collective::kReduceScatter)
    throw_usage("'" + name + "' is for reduce_scatter only");
  if (algorithm.is_within_host() && collective != Collective::kAllreduce)
    throw_usage("'" + name + "' is for allreduces only");
  if (algorithm.kind == Kind::kMessages && has_plans(collective))
    throw_usage("'" + name + "' is for gather, scatter and alltoall only, by a rule of MULTIRING_TUNING");
  if (algorithm.kind == Kind::kPlan && !has_plans(collective))
    throw_usage(std::string(collective_name(collective)) + " has no plans such as " + name +
                ": it crosses hosts by rounds or messages");
  if (algorithm.kind == Kind::kPlan && collective != Collective::kAllreduce) require_blocks(algorithm.mode);
}

std::string algorithm_name(const CrossingAlgorithm& algorithm) {
  if (algorithm.kind == Kind::kNccl) return "nccl";  // no modes that could be read back
  if (algorithm.kind == Kind::kPeers) return "peers";
  for (const auto& [kind, word] : kNames)
    if (algorithm.kind == kind) return std::string(word);
  return (algorithm.kind == Kind::kAllreducePlan ? std::string(kAllreduceOf) : "") +
         format_mode(algorithm.mode);
}

std::uint16_t hash_of(const CrossingAlgorithm& algorithm) {
  if (algorithm.is_rounds()) return 0;
  std::uint64_t hash = hash_name(algorithm_name(algorithm)) + algorithm.segment;
  hash ^= hash >> 32U;
  return static_cast<std::uint16_t>((hash ^ hash >> 16U) | 1U);
}

std::vector<Range> block_segments(std::span<const std::size_t> blocks, std::size_t staging_bytes,
                                  std::size_t wanted) {
  const std::size_t most = staging_bytes / kCacheLine * kCacheLine;
  const std::size_t segment =
      segment_bytes(std::accumulate(blocks.begin(), blocks.end(), std::size_t{0}), most, wanted);
  const std::size_t longest = *std::ranges::max_element(blocks);
  std::vector<Range> found;
  for (std::size_t begin = 0; begin < longest;) {
    const auto longer = static_cast<std::size_t>(
        std::ranges::count_if(blocks, [&](std::size_t each) { return each > begin; }));
    std::size_t part = round_up((segment + longer - 1) / longer, kCacheLine);
    if (part * longer > most) part = most / longer / kCacheLine * kCacheLine;
    if (part == 0) return {};
    found.push_back({begin, std::min(begin + part, longest)});
    begin = found.back().end;
  }
  return found;
}

std::size_t plan_segment_bytes(std::size_t bytes, std::size_t staging_bytes, std::size_t wanted) {
  return segment_bytes(bytes, staging_bytes / 2 / kCacheLine * kCacheLine, wanted);
}

}  // namespace multiring
