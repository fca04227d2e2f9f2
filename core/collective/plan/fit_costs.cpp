#include "collective/plan/fit_costs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "collective/plan/algorithm_table.h"

namespace multiring {
namespace {

constexpr std::size_t kCostCount = 10;
using Vector = std::array<double, kCostCount>;  // logarithms of costs
using Matrix = std::array<Vector, kCostCount>;

// What is assumed before anything is measured, and how much a factor of e away from it counts, beside an
// error of a prediction by that factor.
constexpr double kPriorWeight = 0.05;
constexpr int kMaxSteps = 100;
constexpr double kMaxDamping = 1e6;
constexpr double kGoodEnough = 1e-6;  // of the sum of squares, in a step
// Losses explain so much of the sum of squares, and take so long, or there are none: TCP sends again after
// 0.2 s, which the median of a few repetitions may hide.
constexpr double kUnexplained = 0.6;
constexpr double kMinLossSeconds = 0.01;
constexpr double kAll = std::numeric_limits<double>::infinity();

JobCosts assumed() {
  JobCosts costs;
  costs.call_seconds = 1e-5;  // their defaults, none, have no logarithm
  costs.burst_bytes = 4096;
  costs.loss_seconds = 0.05;  // TCP waits 0.2 s, unless more arrives after what is lost
  costs.shared_message_seconds = 1e-6;
  costs.shared_bytes_per_second = 1e10;  // nearer to where it would be noticed
  return costs;
}

/// All costs but the length of a queue, on which times do not depend smoothly.
template <class Visit>
void visit_fitted(const Visit& visit) {
  visit_costs([&](const char*, double JobCosts::* cost) {
    if (cost != &JobCosts::queue_bytes) visit(cost);
  });
}

Vector logarithms(const JobCosts& costs) {
  Vector logs{};
  std::size_t index = 0;
  visit_fitted([&](double JobCosts::* cost) { logs[index++] = std::log(costs.*cost); });
  return logs;
}

JobCosts costs_of(const Vector& logs, double queue_bytes) {
  JobCosts costs;
  std::size_t index = 0;
  visit_fitted([&](double JobCosts::* cost) { costs.*cost = std::exp(logs[index++]); });
  costs.queue_bytes = queue_bytes;
  if (queue_bytes == kAll) costs.loss_seconds = 0.0;
  return costs;
}

/// Solves a * x = b for a symmetric positive definite matrix, by Cholesky's method.
Vector solve(Matrix a, Vector b) {
  for (std::size_t i = 0; i < kCostCount; ++i) {
    for (std::size_t j = 0; j <= i; ++j) {
      double sum = a[i][j];
      for (std::size_t k = 0; k < j; ++k) sum -= a[i][k] * a[j][k];
      a[i][j] = i == j ? std::sqrt(sum) : sum / a[j][j];
    }
  }
  for (std::size_t i = 0; i < kCostCount; ++i) {
    for (std::size_t k = 0; k < i; ++k) b[i] -= a[i][k] * b[k];
    b[i] /= a[i][i];
  }
  for (std::size_t i = kCostCount; i-- > 0;) {
    for (std::size_t k = i + 1; k < kCostCount; ++k) b[i] -= a[k][i] * b[k];
    b[i] /= a[i][i];
  }
  return b;
}

/// How far predictions are from what was measured, and costs from what is assumed.
class Errors {
 public:
  Errors(const Cluster& cluster, std::span<const AllreduceProbe> probes, std::size_t staging_bytes)
      : probes_(probes), table_(cluster, {}, staging_bytes) {
    for (const AllreduceProbe& probe : probes) {
      if (!(probe.seconds > 0.0)) throw_usage("an allreduce was measured to take no time");
      loads_.push_back(table_.load_of(probe.algorithm, probe.bytes));
    }
  }

  std::vector<double> at(const Vector& logs, double queue_bytes) const {
    const JobCosts costs = costs_of(logs, queue_bytes);
    std::vector<double> errors;
    for (std::size_t index = 0; index < probes_.size(); ++index)
      errors.push_back(std::log(table_.seconds(loads_[index], costs) / probes_[index].seconds));
    for (std::size_t index = 0; index < kCostCount; ++index)
      errors.push_back(kPriorWeight * (logs[index] - prior_[index]));
    return errors;
  }

  const Vector& prior() const { return prior_; }
  /// What waits for one host at a time in the probes.
  std::set<double> queued_bytes() const {
    std::set<double> queued;
    for (const AlgorithmTable::Load& load : loads_) queued.insert(table_.queued_bytes(load));
    return queued;
  }

 private:
  std::span<const AllreduceProbe> probes_;
  AlgorithmTable table_;
  std::vector<AlgorithmTable::Load> loads_;
  Vector prior_ = logarithms(assumed());
};

double squares(const std::vector<double>& errors) {
  double sum = 0.0;
  for (const double error : errors) sum += error * error;
  return sum;
}

/// J^T J and -J^T e, with the slopes J of the errors e.
std::pair<Matrix, Vector> normal_equations(const Errors& errors, const Vector& logs, double queue_bytes,
                                           const std::vector<double>& here) {
  constexpr double kStep = 1e-4;
  std::array<std::vector<double>, kCostCount> slopes;
  for (std::size_t i = 0; i < kCostCount; ++i) {
    Vector moved = logs;
    moved[i] += kStep;
    slopes[i] = errors.at(moved, queue_bytes);
    for (std::size_t row = 0; row < here.size(); ++row) slopes[i][row] = (slopes[i][row] - here[row]) / kStep;
  }
  Matrix a{};
  Vector b{};
  for (std::size_t i = 0; i < kCostCount; ++i) {
    for (std::size_t row = 0; row < here.size(); ++row) b[i] -= slopes[i][row] * here[row];
    for (std::size_t j = 0; j < kCostCount; ++j)
      for (std::size_t row = 0; row < here.size(); ++row) a[i][j] += slopes[i][row] * slopes[j][row];
  }
  return {a, b};
}

struct Fit {
  JobCosts costs;
  double squares = 0.0;
};

Fit fit_with_queue(const Errors& errors, double queue_bytes) {
  Vector logs = errors.prior();
  std::vector<double> here = errors.at(logs, queue_bytes);
  double damping = 1e-2;
  for (int step = 0; step < kMaxSteps && damping < kMaxDamping; ++step) {
    auto [a, b] = normal_equations(errors, logs, queue_bytes, here);
    for (std::size_t i = 0; i < kCostCount; ++i) a[i][i] *= 1.0 + damping;
    const Vector change = solve(a, b);
    Vector tried = logs;
    for (std::size_t i = 0; i < kCostCount; ++i) tried[i] += std::clamp(change[i], -1.0, 1.0);
    std::vector<double> there = errors.at(tried, queue_bytes);
    const double before = squares(here);
    const double after = squares(there);
    damping *= after < before ? 0.3 : 10.0;
    if (!(after < before)) continue;
    logs = tried;
    here = std::move(there);
    if (before - after < kGoodEnough * before) break;
  }
  return {costs_of(logs, queue_bytes), squares(here)};
}

}  // namespace

JobCosts fit_costs(const Cluster& cluster, std::span<const AllreduceProbe> probes,
                   std::size_t staging_bytes) {
  if (cluster.host_count() == 1) throw_usage("costs are measured among several hosts");
  if (probes.empty()) throw_usage("costs are fitted to at least one measured allreduce");
  const Errors errors(cluster, probes, staging_bytes);
  Fit best = fit_with_queue(errors, kAll);
  best.squares *= kUnexplained;
  // Perhaps a switch loses what many hosts send to one. What passed and waited the most tells its queue.
  for (const double queued : errors.queued_bytes()) {
    const Fit fit = fit_with_queue(errors, queued);
    if (fit.squares < best.squares && fit.costs.loss_seconds >= kMinLossSeconds) best = fit;
  }
  return best.costs;
}

}  // namespace multiring
