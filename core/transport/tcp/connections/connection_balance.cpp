#include "transport/tcp/connections/connection_balance.h"

#include <algorithm>
#include <limits>

namespace multiring::tcp {
namespace {

// The kernel counts busy time in ticks of 1 to 10 ms: only an average of hundreds of them is meaningful.
constexpr double kBetweenMeasurements = 0.2;  // seconds
constexpr double kMinBusy = 0.2;              // seconds
constexpr double kMinDivided = 1 << 20;       // bytes
constexpr double kNewShare = 0.5;             // of a measurement in the average
// Every connection gets some, so that a measurement notices when it becomes faster.
constexpr double kMinShare = 1.0 / 64.0;
// Less is not worth a frame.
constexpr double kMinStripe = 4096;  // bytes
// Of the time of a short message: measured speeds of equal links differ by less.
constexpr double kAsSoon = 0.25;

}  // namespace

ConnectionBalance::ConnectionBalance(std::size_t connections, std::size_t stripe_threshold, std::size_t first)
    : stripe_threshold_(stripe_threshold),
      first_(first),
      weights_(connections, 1.0),
      shares_(connections, 0.0) {}

void ConnectionBalance::set_weight(std::size_t connection, std::uint32_t weight) {
  if (!fixed_ && !measured_) weights_[connection] = weight;
}

void ConnectionBalance::fix_weights(std::span<const std::uint32_t> weights) {
  weights_.assign(weights.begin(), weights.end());
  fixed_ = true;
}

void ConnectionBalance::divide(std::size_t bytes, std::span<const std::size_t> backlogs,
                               std::vector<StripeRange>& ranges) {
  ranges.clear();
  divided_ += static_cast<double>(bytes);
  if (weights_.size() == 1 || bytes < stripe_threshold_) {
    ranges.push_back({weights_.size() == 1 ? 0 : soonest(bytes, backlogs), 0, bytes});
    return;
  }
  if (fixed_) return divide_into_stripes(bytes, weights_, ranges);
  water_fill(bytes, backlogs);
  divide_into_stripes(bytes, shares_, ranges);
}

std::size_t ConnectionBalance::soonest(std::size_t bytes, std::span<const std::size_t> backlogs) const {
  const auto message = static_cast<double>(std::max<std::size_t>(bytes, 1));
  const auto done = [&](std::size_t connection) {
    return (static_cast<double>(backlogs[connection]) + message) / weights_[connection];
  };
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t connection = 0; connection < weights_.size(); ++connection)
    if (weights_[connection] > 0) least = std::min(least, done(connection));
  const double until = least + kAsSoon * message / std::ranges::max(weights_);
  std::size_t connection = first_ % weights_.size();
  while (!(weights_[connection] > 0 && done(connection) <= until))
    connection = (connection + 1) % weights_.size();
  return connection;
}

// Water-filling: connections whose backlog takes longer than all that the others get receive nothing.
void ConnectionBalance::water_fill(std::size_t bytes, std::span<const std::size_t> backlogs) {
  std::ranges::fill(shares_, 1.0);
  for (bool again = true; again;) {
    again = false;
    auto total = static_cast<double>(bytes);
    double speed = 0.0;
    for (std::size_t connection = 0; connection < shares_.size(); ++connection) {
      if (shares_[connection] <= 0) continue;
      total += static_cast<double>(backlogs[connection]);
      speed += weights_[connection];
    }
    for (std::size_t connection = 0; connection < shares_.size(); ++connection) {
      if (shares_[connection] <= 0) continue;
      shares_[connection] = total / speed * weights_[connection] - static_cast<double>(backlogs[connection]);
      if (shares_[connection] >= kMinStripe) continue;
      shares_[connection] = 0.0;
      again = true;
      break;  // without its backlog the others' shares are smaller
    }
  }
}

bool ConnectionBalance::wants_measurement(double now) const {
  return weights_.size() > 1 && !fixed_ && divided_ >= kMinDivided &&
         now - measured_at_ >= kBetweenMeasurements;
}

void ConnectionBalance::measure(double now, std::span<const ConnectionProgress> progress) {
  measured_at_ = now;
  divided_ = 0.0;
  const std::vector<ConnectionProgress> before = before_;
  before_.assign(progress.begin(), progress.end());
  if (before.size() != progress.size()) return;
  std::vector<double> speeds;
  for (std::size_t connection = 0; connection < progress.size(); ++connection) {
    const double busy = progress[connection].busy - before[connection].busy;
    const auto bytes =
        static_cast<double>(progress[connection].acknowledged - before[connection].acknowledged);
    if (busy < kMinBusy || bytes <= 0) {
      before_[connection] = before[connection];  // the measurement goes on
      speeds.push_back(0.0);
    } else {
      speeds.push_back(bytes / busy);
    }
  }
  // The first speeds replace weights in other units, so all connections need one.
  if (!measured_ && std::ranges::find(speeds, 0.0) != speeds.end()) return;
  for (std::size_t connection = 0; connection < speeds.size(); ++connection) {
    if (speeds[connection] <= 0) continue;
    weights_[connection] = measured_ ? weights_[connection] * (1 - kNewShare) + speeds[connection] * kNewShare
                                     : speeds[connection];
  }
  measured_ = true;
  const double fastest = std::ranges::max(weights_);
  for (double& weight : weights_) weight = std::max(weight, fastest * kMinShare);
}

}  // namespace multiring::tcp
