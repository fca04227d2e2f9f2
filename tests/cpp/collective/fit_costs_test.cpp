// Costs that are fitted to measured allreduces.

#include "collective/plan/fit_costs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "collective/plan/algorithm_table.h"
#include "support/errors.h"

namespace multiring {
namespace {

using namespace testing;

constexpr std::size_t kStaging = 256 * 1024;
// Those that a job measures (tuning/costs.py).
const std::vector<std::size_t> kSizes{1024, 16 * 1024, 128 * 1024, 1024 * 1024};

Cluster hosts_of(const std::vector<int>& ranks) { return make_cluster(ranks, {{1e9, 0.0}}); }

/// What the algorithms would take at these costs, but for an error of up to `noise`.
std::vector<AllreduceProbe> measured_at(const Cluster& cluster, const JobCosts& costs,
                                        const std::vector<std::string>& algorithms, double noise = 0.0) {
  const AlgorithmTable table(cluster, {}, kStaging);
  std::vector<AllreduceProbe> probes;
  double error = noise;
  for (const std::size_t bytes : kSizes) {
    for (const std::string& name : algorithms) {
      const CrossingAlgorithm algorithm = parse_algorithm(name);
      const double seconds = table.seconds(table.load_of(algorithm, bytes), costs) * (1.0 + error);
      probes.push_back({algorithm, bytes, seconds});
      error = -error;
    }
  }
  return probes;
}

double predicted(const Cluster& cluster, const JobCosts& costs, const CrossingAlgorithm& algorithm,
                 std::size_t bytes) {
  const AlgorithmTable table(cluster, {}, kStaging);
  return table.seconds(table.load_of(algorithm, bytes), costs);
}

double predicted(const Cluster& cluster, const JobCosts& costs, const std::string& name, std::size_t bytes) {
  return predicted(cluster, costs, parse_algorithm(name), bytes);
}

/// What a job with these costs chooses.
CrossingAlgorithm chosen_at(Cluster cluster, const JobCosts& costs, std::size_t bytes) {
  set_speeds(cluster, costs);
  PlanOptions options;
  options.count = bytes / sizeof(float);
  return AlgorithmTable(cluster, cost_model(costs), kStaging).quickest(options);
}

struct Job {
  const char* name;
  JobCosts costs;
};

std::vector<Job> jobs() {
  JobCosts slow;
  slow.latency = 200e-6;
  slow.bytes_per_second = 125e6;
  JobCosts crowded;
  crowded.call_seconds = 100e-6;
  crowded.synchronisation = 40e-6;
  crowded.message_seconds = 20e-6;
  crowded.shared_message_seconds = 10e-6;
  crowded.shared_bytes_per_second = 2e9;
  JobCosts bursty;
  bursty.bytes_per_second = 125e6;
  bursty.burst_bytes = 256e3;
  return {{"usual", {}}, {"slow", slow}, {"crowded", crowded}, {"bursty", bursty}};
}

TEST(FitCosts, PredictsWhatWasNotMeasuredAndChoosesByIt) {
  for (const std::vector<int>& ranks : {std::vector<int>{2, 2}, {2, 2, 2, 2}, {3, 1, 2}, {1, 1, 1, 1, 1}}) {
    const Cluster cluster = hosts_of(ranks);
    const Mode flat = flat_mode(cluster);
    const std::string within = std::to_string(flat[0].size) + "px" + std::to_string(flat[1].size);
    const std::vector<std::string> few{"rounds", within + "p", within + "d", within + "t"};
    for (const Job& job : jobs()) {
      const JobCosts fitted = fit_costs(cluster, measured_at(cluster, job.costs, few), kStaging);
      for (const std::size_t bytes : {4UL << 10, 128UL << 10, 1UL << 20, 64UL << 20}) {
        SCOPED_TRACE(std::string(job.name) + " " + within + " " + std::to_string(bytes) + ": " +
                     format_costs(fitted));
        std::vector<double> wanted;
        std::vector<double> found;
        for (const std::string& name : few) {
          wanted.push_back(predicted(cluster, job.costs, name, bytes));
          found.push_back(predicted(cluster, fitted, name, bytes));
          EXPECT_NEAR(found.back() / wanted.back(), 1.0, 0.25) << name;
        }
        const auto chosen = std::ranges::min_element(found) - found.begin();
        EXPECT_LE(wanted[static_cast<std::size_t>(chosen)], 1.1 * std::ranges::min(wanted));
      }
    }
  }
}

TEST(FitCosts, IsNotMisledByALittleNoise) {
  const Cluster cluster = hosts_of({2, 2, 2, 2});
  for (const Job& job : jobs()) {
    const std::vector<AllreduceProbe> noisy =
        measured_at(cluster, job.costs, {"rounds", "2px4p", "2px4d", "2px4t"}, 0.1);
    const JobCosts fitted = fit_costs(cluster, noisy, kStaging);
    for (const AllreduceProbe& probe : noisy) {
      const AlgorithmTable table(cluster, {}, kStaging);
      const double seconds = table.seconds(table.load_of(probe.algorithm, probe.bytes), fitted);
      EXPECT_NEAR(seconds / probe.seconds, 1.0, 0.25) << job.name;
    }
  }
}

TEST(FitCosts, OneStallIsNoLoss) {
  for (const std::vector<int>& ranks : {std::vector<int>(2, 1), std::vector<int>(4, 1)}) {
    const Cluster cluster = hosts_of(ranks);
    const std::string flat = "1px" + std::to_string(ranks.size());
    for (const Job& job : jobs()) {
      std::vector<AllreduceProbe> probes =
          measured_at(cluster, job.costs, {"rounds", flat + "p", flat + "d", flat + "t"}, 0.1);
      probes.back().seconds += 0.03;
      EXPECT_EQ(fit_costs(cluster, probes, kStaging).queue_bytes, std::numeric_limits<double>::infinity())
          << job.name << " " << flat;
    }
  }
}

// Between what passed and what was lost it is taken for lost: to be wrong there costs little.
TEST(FitCosts, NothingIsChosenThatASwitchWithAShortQueueLoses) {
  JobCosts lossy;
  lossy.bytes_per_second = 125e6;
  lossy.queue_bytes = 64e3;
  lossy.loss_seconds = 0.1;
  for (const std::vector<int>& ranks : {std::vector<int>(4, 2), std::vector<int>(8, 1)}) {
    const Cluster cluster = hosts_of(ranks);
    const std::string within = ranks.size() == 4 ? "2px" : "1px";
    const std::string across = ranks.size() == 4 ? "2px2" : "2px2px2";
    const std::string flat = std::to_string(ranks.size());
    const std::vector<std::string> few{"rounds", within + flat + "p", within + across + "p",
                                       within + across + "d"};
    const std::vector<AllreduceProbe> probes = measured_at(cluster, lossy, few, 0.1);
    const JobCosts fitted = fit_costs(cluster, probes, kStaging);
    EXPECT_LE(fitted.queue_bytes, lossy.queue_bytes);
    EXPECT_NEAR(fitted.loss_seconds / lossy.loss_seconds, 1.0, 0.25);
    for (std::size_t bytes = 1024; bytes <= 4 << 20; bytes *= 2) {
      SCOPED_TRACE(within + flat + " " + std::to_string(bytes) + ": " + format_costs(fitted));
      const double chosen = predicted(cluster, lossy, chosen_at(cluster, fitted, bytes), bytes);
      const double quickest = predicted(cluster, lossy, chosen_at(cluster, lossy, bytes), bytes);
      EXPECT_LT(quickest, lossy.loss_seconds) << "in segments of which nothing is lost";
      for (const std::string& name : few)
        EXPECT_LE(quickest, kAsGood * predicted(cluster, lossy, name, bytes)) << name;
      EXPECT_LE(chosen, 2.0 * quickest) << algorithm_name(chosen_at(cluster, fitted, bytes)) << "/"
                                        << chosen_at(cluster, fitted, bytes).segment;
    }
  }
}

TEST(FitCosts, ASlowNetworkLosesNothing) {
  for (const Job& job : jobs()) {
    const std::vector<AllreduceProbe> noisy =
        measured_at(hosts_of({1, 1, 1, 1}), job.costs, {"rounds", "1px4p", "1px2px2p", "1px4t"}, 0.2);
    EXPECT_EQ(fit_costs(hosts_of({1, 1, 1, 1}), noisy, kStaging).loss_seconds, 0.0) << job.name;
  }
}

TEST(FitCosts, KeepsWhatIsAssumedOfWhatOneProbeDoesNotTell) {
  const Cluster cluster = hosts_of({1, 1});
  const JobCosts fitted =
      fit_costs(cluster, std::vector<AllreduceProbe>{{parse_algorithm("rounds"), 1024, 1.0}}, kStaging);
  EXPECT_NEAR(predicted(cluster, fitted, "rounds", 1024), 1.0, 0.3);
  EXPECT_NEAR(fitted.synchronisation, JobCosts().synchronisation, 1e-9) << "no host has two ranks";
}

TEST(FitCosts, RefusesWhatWasNotMeasured) {
  const Cluster cluster = hosts_of({1, 1});
  const CrossingAlgorithm rounds = parse_algorithm("rounds");
  expect_usage([&] { fit_costs(cluster, {}, kStaging); }, "at least one");
  expect_usage([&] { fit_costs(cluster, std::vector<AllreduceProbe>{{rounds, 4, 0.0}}, kStaging); },
               "no time");
  expect_usage(
      [&] { fit_costs(cluster, std::vector<AllreduceProbe>{{parse_algorithm("2x2"), 4, 1.0}}, kStaging); },
      "mode 2x2");
}

TEST(FitCosts, AreOfSeveralHosts) {
  const std::vector<AllreduceProbe> probes{{parse_algorithm("rounds"), 1024, 1e-5}};
  expect_usage([&] { fit_costs(hosts_of({4}), probes, kStaging); }, "among several hosts");
}

}  // namespace
}  // namespace multiring
