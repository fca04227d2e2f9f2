#pragma once

#include <string>

namespace multiring {

/// The host's name, for messages only: containers and clusters give it twice.
std::string host_name();
/// Tells hosts apart: two processes with the same identity can share memory through a Unix socket.
std::string host_identity();
/// Tells apart what has different network devices, though it may be on the same host: containers, as a rule.
std::string network_identity();
/// Cores that the control group's quota allows, rounded up; INT_MAX without a quota.
int cpu_quota();

}  // namespace multiring
