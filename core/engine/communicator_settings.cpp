#include "engine/communicator_settings.h"

#include <algorithm>

#include "topology/dimensions.h"

namespace multiring {

std::string follow_tuning(Exchange& exchange, const CommunicatorOptions& options) {
  if (options.tuning.empty()) return "";
  const Tuning tuning = Tuning::parse(options.tuning);
  try {
    exchange.plans().set_tuning(tuning, exchange.transport());
    return options.tuning;
  } catch (const Error& error) {
    const std::string costs = tuning.costs_text();
    exchange.plans().set_tuning(Tuning::parse(costs), exchange.transport());
    if (exchange.rank() == 0 && options.warn)
      options.warn(std::string("MULTIRING_TUNING: its rules are not followed: ") + error.what());
    return costs;
  }
}

namespace {

void warn_of_rings(const Transport& transport, const CommunicatorOptions& options,
                   const std::string& followed) {
  if (options.order == Order::kAny) return;
  const auto warn_of = [&](const std::string& what, const Mode& mode) {
    const auto found = std::ranges::find_if(mode, needs_any_order);
    if (found == mode.end()) return false;
    options.warn(what + " has a " + traits_of(*found->algorithm).name +
                 ", which adds in another order than the canonical one: only calls that allow any order use "
                 "it, and the others a pairwise exchange or a chain in its place. MULTIRING_ORDER=any "
                 "allows all to");
    return true;
  };
  const bool is_forced = !options.mode.empty();
  if (is_forced && warn_of("mode " + options.mode, parse_algorithm(options.mode).mode)) return;
  if (transport.shares_memory()) return;  // no rule is followed
  const Tuning tuning = Tuning::parse(followed);
  for (const Tuning::Rule& rule : tuning.rules()) {
    if (!adds(rule.collective) || (is_forced && rule.collective == Collective::kAllreduce)) continue;
    const std::string line = "line " + std::to_string(rule.line) + " of the tuning";
    if (warn_of(line + ", " + algorithm_name(rule.algorithm) + ",", rule.algorithm.mode)) return;
  }
}

// On one host it is the same as the default.
void warn_of_nccl(const Exchange& exchange, const CommunicatorOptions& options) {
  const bool is_asked = options.nccl == NcclScope::kHierarchical || options.nccl == NcclScope::kAll;
  if (!is_asked || exchange.transport().shares_memory()) return;
  const bool is_served = exchange.nccl().serves(exchange, OpKind::kAllreduce);
  std::string why;
  if (!options.may_stay_on_devices)
    why = "has no effect with a mode: unset MULTIRING_MODE";
  else if (!is_served && options.nccl == NcclScope::kAll)
    why = "has no effect where hosts reach their neighbours alone (MULTIRING_HOST_LINKS)";
  else if (!is_served)
    why = "has no effect here: all hosts need as many ranks, at least two";
  else if (options.nccl == NcclScope::kAll && is_rounded(options.comm_dtype))
    why = "is not for sums of float32 that cross hosts in half precision: unset MULTIRING_COMM_DTYPE";
  else if (options.order != Order::kAny)
    why = "is for calls that allow any order only: MULTIRING_ORDER=any allows all to";
  else
    return;
  options.warn(std::string("MULTIRING_NCCL=") + nccl_scope_name(options.nccl) + " " + why);
}

}  // namespace

void warn_of_settings(const Exchange& exchange, const CommunicatorOptions& options,
                      const std::string& followed) {
  warn_of_rings(exchange.transport(), options, followed);
  warn_of_nccl(exchange, options);
}

}  // namespace multiring
