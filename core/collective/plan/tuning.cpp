#include "collective/plan/tuning.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "collective/descriptor.h"

namespace multiring {
namespace {

constexpr std::string_view kBlanks = " \t\r";
constexpr std::string_view kCostsLine = "costs";

std::string_view strip(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

/// The first word of a text, and what follows it.
std::pair<std::string_view, std::string_view> split_off(std::string_view text) {
  const std::size_t blank = std::min(text.find_first_of(kBlanks), text.size());
  return {text.substr(0, blank), strip(text.substr(blank))};
}

Tuning::Rule parse_rule(std::string_view interval, std::string_view algorithm) {
  const std::size_t dash = interval.find('-');
  if (dash == std::string_view::npos || algorithm.empty())
    throw_usage("neither costs nor a rule, such as 0-16K rounds or allgather 1M- 4px2r");
  Tuning::Rule rule;
  rule.min_bytes = parse_bytes(interval.substr(0, dash));
  rule.max_bytes = dash + 1 == interval.size() ? std::numeric_limits<std::size_t>::max()
                                               : parse_bytes(interval.substr(dash + 1));
  if (rule.max_bytes < rule.min_bytes) throw_usage("'" + std::string(interval) + "' ends before it begins");
  rule.algorithm = parse_algorithm(algorithm);
  return rule;
}

}  // namespace

Tuning Tuning::parse(std::string_view text) {
  Tuning tuning;
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    ++number;
    line = strip(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    auto [first, rest] = split_off(line);
    try {
      if (first == kCostsLine) {
        if (tuning.costs_) throw_usage("the costs are there already");
        tuning.costs_ = parse_costs(rest);
      } else {
        const std::optional<Collective> collective = find_collective(first);
        if (collective) std::tie(first, rest) = split_off(rest);
        tuning.rules_.push_back(parse_rule(first, rest));
        tuning.rules_.back().line = number;
        tuning.rules_.back().collective = collective.value_or(Collective::kAllreduce);
        require_runs(tuning.rules_.back().algorithm, tuning.rules_.back().collective);
        if (tuning.rules_.back().algorithm.is_within_host())
          throw_usage(
              "'" + algorithm_name(tuning.rules_.back().algorithm) +
              "' is for ranks of one host, by MULTIRING_MODE; rules are for collectives across hosts");
      }
    } catch (const Error& error) {
      throw_usage("line " + std::to_string(number) + " of the tuning, '" + std::string(line) +
                  "': " + error.what());
    }
  }
  return tuning;
}

const CrossingAlgorithm* Tuning::rule(Collective collective, std::size_t bytes) const {
  const auto found = std::ranges::find_if(rules_, [&](const Rule& rule) {
    return rule.collective == collective && rule.min_bytes <= bytes && bytes <= rule.max_bytes;
  });
  return found == rules_.end() ? nullptr : &found->algorithm;
}

std::uint16_t hash_of(const Tuning& tuning, Collective collective) {
  std::string text = tuning.costs_text();
  for (const Tuning::Rule& rule : tuning.rules())
    if (rule.collective == collective)
      text += " " + std::to_string(rule.min_bytes) + "-" + std::to_string(rule.max_bytes) + " " +
              std::to_string(hash_of(rule.algorithm));
  const std::uint64_t hash = hash_name(text);
  return static_cast<std::uint16_t>(hash ^ hash >> 16U ^ hash >> 32U ^ hash >> 48U);
}

std::string Tuning::costs_text() const {
  return costs_ ? std::string(kCostsLine) + " " + format_costs(*costs_) : "";
}

}  // namespace multiring
