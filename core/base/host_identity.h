#pragma once

#include <string>

namespace multiring {

/// The host's name, for messages only: containers and clusters may use one name twice.
std::string host_name();
/// Identifies a host: two processes with the same identity can share memory through a Unix socket.
std::string host_identity();
/// Differs between processes with different network devices, even on one host: usually containers.
std::string network_identity();
/// Cores that the control group's quota allows, rounded up; INT_MAX without a quota.
int cpu_quota();

}  // namespace multiring
