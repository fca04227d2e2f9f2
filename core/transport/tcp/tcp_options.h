#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/export.h"
#include "base/job_settings.h"
#include "transport/tcp/lost_ranks.h"

namespace multiring::tcp {

/// Number of incoming connections whose handshake is not done. The networks of a job share one counter: a
/// process has many networks and one limit on its descriptors.
using OpenHandshakes = std::atomic<std::size_t>;

/// One TCP network.
struct TcpOptions : JobSettings {
  explicit TcpOptions(const JobSettings& settings = {}) : JobSettings(settings) {}

  int rank = 0;
  int size = 1;
  /// The ranks as the world numbers them, for messages; empty: the same numbers.
  std::vector<int> world;
  /// Known only to the ranks of the job; not empty.
  std::string secret;
  /// Tells jobs, and generations of a job, apart that share a secret or a store.
  std::string job;
  /// All ranks are on this host: loopback is enough.
  bool local = false;
  /// The ranks are connected by another network: that this host has no interface any more means that it has
  /// lost the others, and is no mistake in `interfaces`.
  bool connected_before = false;
  /// The same on all ranks.
  int channels = 1;
  int connections_per_interface = 1;
  /// So many heartbeats for a connection that gets no answer while others to the same address do.
  static constexpr double kSlowPathFactor = 6.0;
  /// Copies of the options share it.
  std::shared_ptr<LostRanks> lost_ranks = std::make_shared<LostRanks>();
  double handshake_seconds = 10.0;
  /// Limit of `open_handshakes`: incoming connections in their handshake. Beyond it a network closes its
  /// oldest one. Every network may have kReservedHandshakes, so that a flood at the port of one does not lock
  /// out the others. Copies of the options share the counter.
  std::size_t max_handshakes = 128;
  std::shared_ptr<OpenHandshakes> open_handshakes = std::make_shared<OpenHandshakes>(0);
};

/// The options that have to be the same on all ranks.
MULTIRING_API std::uint64_t settings_of(const TcpOptions& options);

}  // namespace multiring::tcp

namespace multiring {
using tcp::TcpOptions;
}  // namespace multiring
