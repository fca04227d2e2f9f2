#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/export.h"
#include "transport/tcp/connections/stripes.h"

namespace multiring::tcp {

/// What a connection has sent so far, as the kernel counts.
struct ConnectionProgress {
  std::uint64_t acknowledged = 0;  ///< bytes
  double busy = 0.0;               ///< seconds with unacknowledged data
};
ConnectionProgress progress_of(int socket);

/// Divides messages among the connections of a stream so that all of them finish at the same time, backlogs
/// included. Speeds are those of the interfaces at first, then measured ones: bytes per second while there
/// was something to send. The backlogs correct for inexact speeds.
class MULTIRING_API ConnectionBalance {
 public:
  /// Messages below `stripe_threshold` go over one connection: of those that would be done about as soon as
  /// any, over `first` or the next one.
  ConnectionBalance(std::size_t connections, std::size_t stripe_threshold, std::size_t first = 0);

  void set_weight(std::size_t connection, std::uint32_t weight);
  /// No measurement changes them any more. One for each connection, not all 0.
  void fix_weights(std::span<const std::uint32_t> weights);
  std::span<const double> weights() const { return weights_; }

  /// The parts of the next message, at least one. `backlogs`: bytes that the peer does not have yet.
  void divide(std::size_t bytes, std::span<const std::size_t> backlogs, std::vector<StripeRange>& ranges);

  /// Whether enough was sent since the last measurement.
  bool wants_measurement(double now) const;
  /// `now`: seconds of any clock.
  void measure(double now, std::span<const ConnectionProgress> progress);

 private:
  std::size_t soonest(std::size_t bytes, std::span<const std::size_t> backlogs) const;
  /// Sets `shares_`, in bytes.
  void water_fill(std::size_t bytes, std::span<const std::size_t> backlogs);

  std::size_t stripe_threshold_;
  std::size_t first_;
  bool fixed_ = false;
  bool measured_ = false;
  std::vector<double> weights_;  // in bytes per second, once measured
  std::vector<double> shares_;
  double divided_ = 0.0;  // bytes since the last measurement
  double measured_at_ = 0.0;
  std::vector<ConnectionProgress> before_;
};

}  // namespace multiring::tcp
