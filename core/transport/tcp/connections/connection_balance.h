#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/export.h"
#include "transport/tcp/connections/stripes.h"

namespace multiring::tcp {

/// What a connection has moved so far, as the kernel counts.
struct LinkProgress {
  std::uint64_t acknowledged = 0;  ///< bytes
  double busy = 0.0;               ///< seconds with something on its way
};
LinkProgress progress_of(int socket);

/// Divides messages among the connections of a stream so that all of them would be rid at the same time of
/// what they still have and of what they get. How fast they are is told by the interfaces at first, then by
/// what has passed in the time in which there was something to pass; since that is known roughly only, what
/// has not passed yet corrects it.
class MULTIRING_API LinkBalance {
 public:
  /// Messages below `whole_below` go over one connection: a second one would cost more calls than it saves.
  LinkBalance(std::size_t links, std::size_t whole_below);

  void set_weight(std::size_t link, std::uint32_t weight);
  /// Fixed from now on. One for each link, not all of them 0.
  void fix_weights(std::span<const std::uint32_t> weights);
  std::span<const double> weights() const { return weights_; }

  /// The parts of the next message; at least one, also of an empty message. `backlogs`: bytes that each link
  /// was given and the peer does not have yet.
  void divide(std::size_t bytes, std::span<const std::size_t> backlogs, std::vector<StripeRange>& ranges);

  /// Whether enough has been divided since the last measurement, for it to be worth another.
  bool wants_measurement(double now) const;
  /// What the links have moved by `now`, in seconds of any clock.
  void measure(double now, std::span<const LinkProgress> progress);

 private:
  std::size_t first_to_be_free(std::span<const std::size_t> backlogs) const;
  /// The shares of `bytes`, in bytes.
  void fill_up(std::size_t bytes, std::span<const std::size_t> backlogs);

  std::size_t whole_below_;
  bool fixed_ = false;
  bool measured_ = false;
  std::vector<double> weights_;  // in bytes per second, once measured
  std::vector<double> shares_;
  double divided_ = 0.0;  // bytes since the last measurement
  double measured_at_ = 0.0;
  std::vector<LinkProgress> before_;
};

}  // namespace multiring::tcp
