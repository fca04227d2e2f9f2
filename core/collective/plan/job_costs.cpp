#include "collective/plan/job_costs.h"

#include <charconv>
#include <cmath>

#include "base/error.h"

namespace multiring {
namespace {

// Speeds are positive; times may be zero.
bool is_speed(std::string_view name) { return name.ends_with("bytes_per_second"); }

double parse_cost(std::string_view name, std::string_view text) {
  double value = 0.0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = error == std::errc() && rest == text.data() + text.size() && value >= 0.0;
  if (!is_number || (is_speed(name) ? value == 0.0 : std::isinf(value)))
    throw_usage(std::string(name) + " is '" + std::string(text) + "', not a number " +
                (is_speed(name) ? "above 0" : "of 0 or more"));
  return value;
}

}  // namespace

std::string format_costs(const JobCosts& costs) {
  std::string text;
  visit_costs([&](const char* name, double JobCosts::* cost) {
    char number[32];
    const auto [end, error] = std::to_chars(number, number + sizeof number, costs.*cost);
    text += (text.empty() ? "" : " ") + std::string(name) + "=" + std::string(number, end);
  });
  return text;
}

JobCosts parse_costs(std::string_view text) {
  JobCosts costs;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string_view word = text.substr(begin, end - begin);
    begin = end + 1;
    if (word.empty()) continue;
    const std::size_t equals = std::min(word.find('='), word.size());
    const std::string_view name = word.substr(0, equals);
    bool known = false;
    visit_costs([&](const char* each, double JobCosts::* cost) {
      if (name != each) return;
      known = true;
      costs.*cost = parse_cost(name, equals < word.size() ? word.substr(equals + 1) : "");
    });
    if (!known) throw_usage("there is no cost '" + std::string(name) + "'");
  }
  return costs;
}

void set_speeds(Cluster& cluster, const JobCosts& costs) {
  for (Host& host : cluster.hosts) {
    host.interfaces = {{costs.bytes_per_second, costs.latency}};
    // Few ranks reach what the memory of a host can do, as far as an allreduce of several hosts goes.
    host.memory = {2 * costs.memory_bytes_per_second, costs.synchronisation};
  }
}

CostModel cost_model(const JobCosts& costs) {
  CostModel model;
  model.call_seconds = costs.call_seconds;
  model.message_seconds = costs.message_seconds;
  model.shared_message_seconds = costs.shared_message_seconds;
  model.shared_bytes_per_second = costs.shared_bytes_per_second;
  model.reduction_bytes_per_second = costs.memory_bytes_per_second;
  return model;
}

}  // namespace multiring
