#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "base/export.h"
#include "topology/plan.h"
#include "topology/plan_load.h"

namespace multiring {

/// What messages between hosts cost: latency + bytes / bytes_per_second (Hockney's alpha and beta).
struct LinkCost {
  double latency = 0.0;           ///< seconds
  double bytes_per_second = 0.0;  ///< of a host in each direction, all its interfaces together
};

/// Costs of a plan besides the speeds of its cluster.
struct CostModel {
  double call_seconds = 0.0;                ///< of an allreduce by whatever algorithm
  double message_seconds = 5e-6;            ///< of the processor for one message to another host
  double interface_message_seconds = 1e-6;  ///< of an interface for one message of any rank
  /// About so many bytes of a collective pass a link at once, where it saves up what it did not send (a token
  /// bucket), or has a queue.
  double burst_bytes = 0.0;
  /// So much may be on its way to a host at once, which a switch keeps for it. It loses what is more, which
  /// takes `loss_seconds` to be noticed and sent again (incast).
  double queue_bytes = std::numeric_limits<double>::infinity();
  double loss_seconds = 0.0;
  double shared_message_seconds = 0.0;  ///< of what all ranks share, for one message of any of them
  /// That all hosts together send, as where a switch has less than all its links.
  double shared_bytes_per_second = std::numeric_limits<double>::infinity();
  double reduction_bytes_per_second = 10e9;  ///< that one rank reads and writes while it adds
  /// Links of the dimensions 1, 2, ... where they differ from the interfaces of the hosts (far hosts behind a
  /// slower switch); further dimensions have the interfaces'.
  std::vector<LinkCost> dimensions;

  /// The part of so many bytes that takes a link its time: hardly any of less than a burst, all but a burst
  /// of more. Between them it is a curve, for the fit of costs needs slopes: the fourth power follows what
  /// token buckets do the closest of those tried.
  double beyond_burst(double bytes) const {
    if (!(bytes > 0.0)) return 1.0;
    const double bursts = std::min(burst_bytes / bytes, 1e9);  // of more nothing is left in a double
    return std::sqrt(std::hypot(1.0, bursts * bursts)) - bursts;
  }
  /// Seconds for which losses hold up what has bytes wait for one host. Those of pieces that are on their way
  /// at once are noticed at once.
  double held_up(const QueueLoad& queue) const {
    constexpr double kRounding = 1.0 + 1e-9;  // as much as has passed may come out a little more
    return queue.bytes > queue_bytes * kRounding ? queue.times * loss_seconds : 0.0;
  }
};

/// Predicted seconds of a step in which chunks go whole.
struct StepCost {
  int hops = 0;
  double latency = 0.0;             ///< of the network, in which nothing is busy
  double synchronisation = 0.0;     ///< of the ranks of a host
  double interface_messages = 0.0;  ///< of the interface that sends the most messages
  double wire = 0.0;                ///< of the busiest interface, or of what all hosts share
  double messages = 0.0;            ///< of the processor of the rank that sends the most messages
  double memory = 0.0;              ///< of the host or rank that reads and writes the most
};

/// Predicted costs of a plan.
struct MULTIRING_API PlanCost {
  std::vector<StepCost> steps;
  double busiest_link = 0.0;  ///< seconds that the busiest link of all steps sends or receives

  /// Seconds if every chunk goes in `segments` pieces (at least 1). While one piece is in a step another is
  /// in the next, so that after the first the slower of network and memory decides; but every piece takes
  /// messages and synchronisations of its own.
  double seconds(std::size_t segments) const;
};

/// The load of a plan of `cluster`, or of one with other speeds. Raises a usage error for a model that is not
/// positive.
MULTIRING_API PlanCost price(const PlanLoad& load, const Cluster& cluster, const CostModel& model);

/// The price of a plan's own load on its own cluster.
MULTIRING_API PlanCost predict_steps(const Plan& plan, const CostModel& model);

/// Seconds, and bytes per second of a host, for what crosses all dimensions: the slowest link decides.
MULTIRING_API double crossing_latency(const Cluster& cluster, const CostModel& model);
MULTIRING_API double crossing_speed(const Host& host, const CostModel& model);

/// Seconds that no plan that treats all hosts alike can go below: every host sends and receives
/// 2 * (hosts - 1) / hosts of the bytes (blocks: half of that), and every rank's elements are read and
/// written once.
MULTIRING_API double limit_seconds(const Plan& plan, const CostModel& model);

/// The dimensions across blocks of hosts (64 hosts: 8x8) by which pairwise exchanges of so many bytes are
/// quickest: the best two, and the best of any number. None: one dimension is as quick, hosts have no
/// divisors, or reach their neighbours only. In one dimension of n hosts each rank sends a message to n - 1
/// others, in dimensions of n1 x n2 x ... only n1 - 1 + n2 - 1 + ..., in more hops; and more bytes, where the
/// sums of a block are no node of the canonical tree.
MULTIRING_API std::vector<Mode> divided_modes(const Cluster& cluster, std::size_t bytes,
                                              const CostModel& model);

/// What is compared, the simplest first: each combination of algorithms that the links between hosts allow,
/// for dimensions of `options.mode` that have none, with one channel and with all. Without a mode the hosts
/// are one dimension, or as many as divided_modes() finds for `segment_bytes`, which pass at once.
MULTIRING_API std::vector<PlanOptions> plan_options(const Cluster& cluster, const PlanOptions& options,
                                                    std::size_t segment_bytes, const CostModel& model);

/// A prediction is not more accurate than this, so of what is this close to the quickest the first, that is
/// the simplest, is taken.
inline constexpr double kAsGood = 1.02;

}  // namespace multiring
