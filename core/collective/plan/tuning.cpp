#include "collective/plan/tuning.h"

#include <algorithm>
#include <charconv>

#include "base/error.h"

namespace multiring {
namespace {

/// `part` of `text` is wrong, and why.
[[noreturn]] void fail_to_parse(std::string_view text, std::string_view part, std::string_view reason) {
  std::string message = "tuning '";
  message.append(text).append("': '").append(part).append("' ").append(reason);
  message += "; a tuning is written like 4x2:16384=rounds,1048576=2tx4d,67108864=auto/65536";
  throw Error(ErrorKind::kUsage, message);
}

std::size_t parse_bytes(std::string_view whole, std::string_view text) {
  std::size_t bytes = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  if (error != std::errc() || rest != text.data() + text.size() || bytes == 0)
    fail_to_parse(whole, text, "is not a number of bytes of 1 or more");
  return bytes;
}

AllreduceAlgorithm parse_algorithm(std::string_view whole, std::string_view text) {
  const std::size_t slash = std::min(text.find('/'), text.size());
  const std::string_view mode = text.substr(0, slash);
  AllreduceAlgorithm algorithm;
  algorithm.staged = mode == "rounds";
  if (!algorithm.staged && mode != "auto") algorithm.mode = parse_mode(mode);
  if (slash == text.size()) return algorithm;
  if (algorithm.staged) fail_to_parse(whole, text, "gives rounds a segment size");
  algorithm.segment = parse_bytes(whole, text.substr(slash + 1));
  return algorithm;
}

}  // namespace

Tuning Tuning::parse(std::string_view text) {
  Tuning tuning;
  const std::size_t colon = text.find(':');
  if (colon == std::string_view::npos || colon == 0)
    fail_to_parse(text, text.substr(0, colon), "names no hosts");
  tuning.layout_ = text.substr(0, colon);
  for (std::size_t begin = colon + 1; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view part = text.substr(begin, end - begin);
    const std::size_t equals = part.find('=');
    if (equals == std::string_view::npos) fail_to_parse(text, part, "names no algorithm");
    SizeClass found{parse_bytes(text, part.substr(0, equals)),
                    parse_algorithm(text, part.substr(equals + 1))};
    if (!tuning.classes_.empty() && found.up_to <= tuning.classes_.back().up_to)
      fail_to_parse(text, part, "is not for larger sizes than what stands before it");
    tuning.classes_.push_back(std::move(found));
    begin = end + 1;
  }
  return tuning;
}

const AllreduceAlgorithm* Tuning::algorithm(std::size_t bytes) const {
  if (classes_.empty()) return nullptr;
  const auto found =
      std::ranges::find_if(classes_, [&](const SizeClass& each) { return bytes <= each.up_to; });
  return found == classes_.end() ? &classes_.back().algorithm : &found->algorithm;
}

std::string layout_text(const Cluster& cluster) {
  std::string text;
  if (cluster.regular()) {
    text += std::to_string(cluster.host_count());
    text += 'x';
    return text += std::to_string(cluster.hosts.front().ranks.size());
  }
  for (const Host& host : cluster.hosts) {
    if (!text.empty()) text += '+';
    text += std::to_string(host.ranks.size());
  }
  return text;
}

}  // namespace multiring
