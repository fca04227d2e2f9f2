#pragma once

#include <string>

#include "collective/exchange.h"
#include "engine/communicator_options.h"

namespace multiring {

/// Follows the tuning of a job's settings in a new communicator. Returns the part of it that is followed: its
/// rules may be for other hosts and ranks, and a job that goes on with fewer is no worse than without rules.
std::string follow_tuning(Exchange& exchange, const CommunicatorOptions& options);

/// Warns of settings that have no effect. `followed`: what follow_tuning returned.
void warn_of_settings(const Exchange& exchange, const CommunicatorOptions& options,
                      const std::string& followed);

}  // namespace multiring
