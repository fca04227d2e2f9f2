#include "transport/tcp/connections/connection_balance.h"

#include <algorithm>

namespace multiring::tcp {
namespace {

// The kernel counts the busy time in ticks of 1 to 10 ms, and a message passes in less: it takes hundreds of
// them for the average to tell something.
constexpr double kBetweenMeasurements = 0.2;  // seconds
constexpr double kLeastBusy = 0.2;            // seconds
constexpr double kLeastDivided = 1 << 20;     // bytes
constexpr double kNewShare = 0.5;             // of a measurement in the average
// A link always gets some, or nothing would tell that it has become faster.
constexpr double kLeastShare = 1.0 / 64.0;
// Less is not worth a frame of its own.
constexpr double kLeastStripe = 4096;  // bytes

}  // namespace

LinkBalance::LinkBalance(std::size_t links, std::size_t whole_below)
    : whole_below_(whole_below), weights_(links, 1.0), shares_(links, 0.0) {}

void LinkBalance::set_weight(std::size_t link, std::uint32_t weight) {
  if (!fixed_ && !measured_) weights_[link] = weight;
}

void LinkBalance::fix_weights(std::span<const std::uint32_t> weights) {
  weights_.assign(weights.begin(), weights.end());
  fixed_ = true;
}

void LinkBalance::divide(std::size_t bytes, std::span<const std::size_t> backlogs,
                         std::vector<StripeRange>& ranges) {
  ranges.clear();
  divided_ += static_cast<double>(bytes);
  if (weights_.size() == 1 || bytes < whole_below_) {
    ranges.push_back({weights_.size() == 1 ? 0 : first_to_be_free(backlogs), 0, bytes});
    return;
  }
  if (fixed_) return divide_into_stripes(bytes, weights_, ranges);
  fill_up(bytes, backlogs);
  divide_into_stripes(bytes, shares_, ranges);
}

std::size_t LinkBalance::first_to_be_free(std::span<const std::size_t> backlogs) const {
  std::size_t best = 0;
  double soonest = -1.0;
  for (std::size_t link = 0; link < weights_.size(); ++link) {
    if (weights_[link] <= 0) continue;
    const double free = static_cast<double>(backlogs[link] + 1) / weights_[link];
    if (soonest >= 0 && free >= soonest) continue;
    soonest = free;
    best = link;
  }
  return best;
}

// As water finds its level: links that are busy for longer than the others will be get nothing.
void LinkBalance::fill_up(std::size_t bytes, std::span<const std::size_t> backlogs) {
  std::ranges::fill(shares_, 1.0);
  for (bool again = true; again;) {
    again = false;
    auto total = static_cast<double>(bytes);
    double speed = 0.0;
    for (std::size_t link = 0; link < shares_.size(); ++link) {
      if (shares_[link] <= 0) continue;
      total += static_cast<double>(backlogs[link]);
      speed += weights_[link];
    }
    for (std::size_t link = 0; link < shares_.size(); ++link) {
      if (shares_[link] <= 0) continue;
      shares_[link] = total / speed * weights_[link] - static_cast<double>(backlogs[link]);
      if (shares_[link] >= kLeastStripe) continue;
      shares_[link] = 0.0;
      again = true;
      break;  // the others' shares are smaller without what it has
    }
  }
}

bool LinkBalance::wants_measurement(double now) const {
  return weights_.size() > 1 && !fixed_ && divided_ >= kLeastDivided &&
         now - measured_at_ >= kBetweenMeasurements;
}

void LinkBalance::measure(double now, std::span<const LinkProgress> progress) {
  measured_at_ = now;
  divided_ = 0.0;
  const std::vector<LinkProgress> before = before_;
  before_.assign(progress.begin(), progress.end());
  if (before.size() != progress.size()) return;
  std::vector<double> speeds;
  for (std::size_t link = 0; link < progress.size(); ++link) {
    const double busy = progress[link].busy - before[link].busy;
    const auto bytes = static_cast<double>(progress[link].acknowledged - before[link].acknowledged);
    if (busy < kLeastBusy || bytes <= 0) {
      before_[link] = before[link];  // goes on until it is long enough to tell
      speeds.push_back(0.0);
    } else {
      speeds.push_back(bytes / busy);
    }
  }
  // The first speeds take the place of weights in other units, so all links have to have one.
  if (!measured_ && std::ranges::find(speeds, 0.0) != speeds.end()) return;
  for (std::size_t link = 0; link < speeds.size(); ++link) {
    if (speeds[link] <= 0) continue;
    weights_[link] = measured_ ? weights_[link] * (1 - kNewShare) + speeds[link] * kNewShare : speeds[link];
  }
  measured_ = true;
  const double fastest = std::ranges::max(weights_);
  for (double& weight : weights_) weight = std::max(weight, fastest * kLeastShare);
}

}  // namespace multiring::tcp
