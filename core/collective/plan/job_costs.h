#pragma once

#include <limits>
#include <string>
#include <string_view>

#include "base/export.h"
#include "topology/cost_model.h"

namespace multiring {

/// What the cost model knows of a job whose hosts are alike: measured (fit_costs.h), or else assumed.
struct JobCosts {
  double call_seconds = 0.0;         ///< of an allreduce by whatever algorithm
  double latency = 20e-6;            ///< seconds of a hop from host to host
  double bytes_per_second = 1.25e9;  ///< of a host, in each direction
  double burst_bytes = 0.0;          ///< about so many of an allreduce pass at once, as links save up some
  double queue_bytes = std::numeric_limits<double>::infinity();  ///< on its way to one host: more is lost
  double loss_seconds = 0.0;                                     ///< that a loss takes
  double synchronisation = 1e-6;                                 ///< seconds, of the ranks of a host
  double message_seconds = 5e-6;                                 ///< of a rank for one of its messages
  double shared_message_seconds = 0.0;  ///< of what all ranks share, for a message of any of them
  double shared_bytes_per_second = std::numeric_limits<double>::infinity();  ///< that all hosts together send
  double memory_bytes_per_second = 10e9;  ///< that one rank reads and writes
};

/// Calls `visit(name, member)` for every cost.
template <class Visit>
void visit_costs(const Visit& visit) {
  visit("call_seconds", &JobCosts::call_seconds);
  visit("latency", &JobCosts::latency);
  visit("bytes_per_second", &JobCosts::bytes_per_second);
  visit("burst_bytes", &JobCosts::burst_bytes);
  visit("queue_bytes", &JobCosts::queue_bytes);
  visit("loss_seconds", &JobCosts::loss_seconds);
  visit("synchronisation", &JobCosts::synchronisation);
  visit("message_seconds", &JobCosts::message_seconds);
  visit("shared_message_seconds", &JobCosts::shared_message_seconds);
  visit("shared_bytes_per_second", &JobCosts::shared_bytes_per_second);
  visit("memory_bytes_per_second", &JobCosts::memory_bytes_per_second);
}

/// "latency=2e-05 bytes_per_second=1.25e+09 ...": read back to the same bits.
MULTIRING_API std::string format_costs(const JobCosts& costs);
/// Raises a usage error that says what is wrong with the text. What is not named keeps its default.
MULTIRING_API JobCosts parse_costs(std::string_view text);

/// The memory of a single host of so many ranks, which measure nothing: fitted to allreduces of two ranks on
/// one core and on two, and of three, four and eight on two (docs/measurements/host-modes.csv), all of whose
/// arrays fit into caches. A synchronisation takes a look at memory that a peer has written, or where ranks
/// outnumber the cores a change of the thread on a core, for each rank.
MULTIRING_API HostMemory host_memory(int ranks, bool oversubscribed);

/// Gives the hosts of a cluster these speeds.
MULTIRING_API void set_speeds(Cluster& cluster, const JobCosts& costs);
MULTIRING_API CostModel cost_model(const JobCosts& costs);

}  // namespace multiring
