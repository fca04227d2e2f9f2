// What a communicator makes of the settings of its job when it begins, and what it says of them.

#include <algorithm>

#include "engine/communicator.h"
#include "topology/dimensions.h"

namespace multiring {

// It may be of other hosts and ranks: a job goes on with fewer, and is no worse than without rules.
void Communicator::follow_tuning() {
  const Tuning tuning = Tuning::parse(options_.tuning);
  try {
    exchange_.plans().set_tuning(tuning, *transport_);
  } catch (const Error& error) {
    tuning_ = tuning.costs_text();
    exchange_.plans().set_tuning(Tuning::parse(tuning_), *transport_);
    if (rank() == 0 && options_.warn)
      options_.warn(std::string("MULTIRING_TUNING: its rules are not followed: ") + error.what());
  }
}

void Communicator::warn_of_rings() const {
  if (options_.order == Order::kAny) return;
  const auto warn_of = [&](const std::string& what, const Mode& mode) {
    const auto found = std::ranges::find_if(mode, needs_any_order);
    if (found == mode.end()) return false;
    options_.warn(what + " has a " + traits_of(*found->algorithm).name +
                  ", which adds in another order than the canonical one: only calls that allow any order use "
                  "it, and the others a pairwise exchange or a chain in its place. MULTIRING_ORDER=any "
                  "allows all to");
    return true;
  };
  const bool is_forced = !options_.mode.empty();
  if (is_forced && warn_of("mode " + options_.mode, parse_algorithm(options_.mode).mode)) return;
  if (transport_->shares_memory()) return;  // no rule is followed
  const Tuning tuning = Tuning::parse(tuning_);
  for (const Tuning::Rule& rule : tuning.rules()) {
    if (!adds(rule.collective) || (is_forced && rule.collective == Collective::kAllreduce)) continue;
    const std::string line = "line " + std::to_string(rule.line) + " of the tuning";
    if (warn_of(line + ", " + algorithm_name(rule.algorithm) + ",", rule.algorithm.mode)) return;
  }
}

// On one host it is the same as the default.
void Communicator::warn_of_nccl() const {
  const bool is_asked = options_.nccl == NcclScope::kHierarchical || options_.nccl == NcclScope::kAll;
  if (!is_asked || transport_->shares_memory()) return;
  const bool is_served = exchange_.nccl().serves(exchange_, OpKind::kAllreduce);
  std::string why;
  if (!options_.may_stay_on_devices)
    why = "has no effect with a mode: unset MULTIRING_MODE";
  else if (!is_served && options_.nccl == NcclScope::kAll)
    why = "has no effect where hosts reach their neighbours alone (MULTIRING_HOST_LINKS)";
  else if (!is_served)
    why = "has no effect here: all hosts need as many ranks, at least two";
  else if (options_.nccl == NcclScope::kAll && is_rounded(options_.comm_dtype))
    why = "is not for sums of float32 that cross hosts in half precision: unset MULTIRING_COMM_DTYPE";
  else if (options_.order != Order::kAny)
    why = "is for calls that allow any order only: MULTIRING_ORDER=any allows all to";
  else
    return;
  options_.warn(std::string("MULTIRING_NCCL=") + nccl_scope_name(options_.nccl) + " " + why);
}

}  // namespace multiring
