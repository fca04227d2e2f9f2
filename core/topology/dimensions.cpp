#include "topology/dimensions.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <iterator>
#include <string>

#include "base/error.h"

namespace multiring {
namespace {

constexpr int kMaxRanks = 1 << 24;

[[noreturn]] void fail_to_parse(std::string_view text, const std::string& reason) {
  throw_usage(
      "mode '" + std::string(text) + "': " + reason +
      "; a mode is written like 4x8x2 (ranks within a host, near hosts, far hosts), and a letter after a "
      "size forces its algorithm: " +
      algorithm_letters());
}

Dimension parse_dimension(std::string_view whole, std::string_view text) {
  Dimension dimension;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, dimension.size);
  if (error == std::errc::result_out_of_range || dimension.size > kMaxRanks)
    fail_to_parse(whole, "'" + std::string(text) + "' is too large");
  if (error != std::errc() || dimension.size < 1)
    fail_to_parse(whole, "'" + std::string(text) + "' does not start with a number of 1 or more");
  if (rest == end) return dimension;
  const auto letter = [](Algorithm algorithm) { return traits_of(algorithm).letter; };
  const auto* const found = std::ranges::find(kAllAlgorithms, *rest, letter);
  if (found == std::end(kAllAlgorithms) || rest + 1 != end)
    fail_to_parse(whole, "'" + std::string(rest, end) + "' is not a letter of an algorithm");
  dimension.algorithm = *found;
  return dimension;
}

/// "48 (12 hosts with 4 ranks each)"; where hosts differ "4 (2 hosts with up to 3 ranks each)".
std::string ranks_on_hosts(const Cluster& cluster) {
  const int most = flat_mode(cluster).front().size;
  return std::to_string(cluster.size()) + " (" + std::to_string(cluster.host_count()) +
         (cluster.host_count() == 1 ? " host" : " hosts") + " with " + (cluster.regular() ? "" : "up to ") +
         std::to_string(most) + (most == 1 ? " rank" : " ranks") +
         (cluster.host_count() == 1 ? ")" : " each)");
}

}  // namespace

Mode parse_mode(std::string_view text) {
  Mode mode;
  for (std::size_t begin = 0;;) {
    const std::size_t end = std::min(text.find('x', begin), text.size());
    mode.push_back(parse_dimension(text, text.substr(begin, end - begin)));
    if (end == text.size()) return mode;
    begin = end + 1;
  }
}

std::string format_mode(const Mode& mode) {
  std::string text;
  for (const Dimension& dimension : mode) {
    if (!text.empty()) text += 'x';
    text += std::to_string(dimension.size);
    if (dimension.algorithm) text += traits_of(*dimension.algorithm).letter;
  }
  return text;
}

bool needs_any_order(const Dimension& dimension) {
  return dimension.size > 2 && dimension.algorithm &&
         traits_of(*dimension.algorithm).by_chunk == ByChunk::kOrder;
}

void require_fit(const Mode& mode, const Cluster& cluster) {
  const std::string name = "mode " + format_mode(mode);
  for (std::size_t index = 0; index + 1 < mode.size(); ++index)
    if (mode[index].algorithm && traits_of(*mode[index].algorithm).reducing_phase == Phase::kAllreduce)
      throw_usage(name + ": " + traits_of(*mode[index].algorithm).name +
                  " leaves the whole sum on every rank, so only the last dimension has it");
  std::int64_t product = 1;
  for (const Dimension& dimension : mode) {
    product *= dimension.size;
    if (product > kMaxRanks) throw_usage(name + " is for more than " + std::to_string(kMaxRanks) + " ranks");
  }
  // Of hosts that differ each counts as the largest.
  const int most = flat_mode(cluster).front().size;
  const bool has_all = product == std::int64_t{most} * cluster.host_count();
  if (!cluster.regular() && (!has_all || mode.front().size != most))
    throw_usage(name + " does not fit the ranks, " + ranks_on_hosts(cluster) +
                "; where hosts differ each counts as the largest: " + format_mode(flat_mode(cluster)));
  if (!has_all)
    throw_usage(name + " is for " + std::to_string(product) + " ranks, but there are " +
                ranks_on_hosts(cluster));
  if (mode.front().size != most)
    throw_usage(name + " has " + std::to_string(mode.front().size) +
                " ranks within a host, but the ranks are " + ranks_on_hosts(cluster) +
                ": the first dimension must be " + std::to_string(most));
}

Mode flat_mode(const Cluster& cluster) {
  std::size_t most = 0;
  for (const Host& host : cluster.hosts) most = std::max(most, host.ranks.size());
  Mode mode{{static_cast<int>(most)}};
  if (cluster.host_count() > 1) mode.push_back({cluster.host_count()});
  return mode;
}

}  // namespace multiring
