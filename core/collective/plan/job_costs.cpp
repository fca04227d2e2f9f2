#include "collective/plan/job_costs.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "base/error.h"

namespace multiring {
namespace {

// Speeds are positive; times may be zero.
bool is_speed(std::string_view name) { return name.ends_with("bytes_per_second"); }

/// What all share may be no limit, and a switch may keep everything.
bool may_be_infinite(std::string_view name) {
  return name == "shared_bytes_per_second" || name == "queue_bytes";
}

double parse_cost(std::string_view name, std::string_view text) {
  double value = 0.0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = error == std::errc() && rest == text.data() + text.size() && value >= 0.0;
  if (!is_number || (is_speed(name) && value == 0.0) || (std::isinf(value) && !may_be_infinite(name)))
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
  constexpr std::string_view kBlanks = " \t";
  JobCosts costs;
  std::set<std::string_view> named;
  for (std::size_t begin = text.find_first_not_of(kBlanks); begin < text.size();
       begin = text.find_first_not_of(kBlanks, begin)) {
    const std::string_view word = text.substr(begin, text.find_first_of(kBlanks, begin) - begin);
    begin += word.size();
    const std::size_t equals = std::min(word.find('='), word.size());
    const std::string_view name = word.substr(0, equals);
    bool known = false;
    visit_costs([&](const char* each, double JobCosts::* cost) {
      if (name != each) return;
      known = true;
      costs.*cost = parse_cost(name, equals < word.size() ? word.substr(equals + 1) : "");
    });
    if (!known) throw_usage("there is no cost '" + std::string(name) + "'");
    if (!named.insert(name).second) throw_usage("it has two costs '" + std::string(name) + "'");
  }
  if (named.empty()) throw_usage("it names no cost");
  return costs;
}

HostMemory host_memory(int ranks, bool oversubscribed) {
  constexpr double kLook = 0.17e-6;
  constexpr double kChange = 1.165e-6;
  constexpr double kRewriting = 12.0;
  // Two ranks that outnumber the cores share one, so that no other core reads anything.
  const bool is_one_core = oversubscribed && ranks == 2;
  return {60e9, ranks * (oversubscribed ? kChange : kLook), is_one_core ? 0.0 : kRewriting};
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
  model.burst_bytes = costs.burst_bytes;
  model.queue_bytes = costs.queue_bytes;
  model.loss_seconds = costs.loss_seconds;
  model.shared_bytes_per_second = costs.shared_bytes_per_second;
  model.reduction_bytes_per_second = costs.memory_bytes_per_second;
  return model;
}

}  // namespace multiring
