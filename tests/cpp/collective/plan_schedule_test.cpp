// Plans as ranks execute them, byte by byte: workspaces, messages and additions of all ranks, without a
// transport. Every algorithm, cluster and dtype gives the bits of one reduce().

#include "collective/plan/plan_schedule.h"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "collective/sums/partial_sums.h"
#include "collective/sums/rounded_sums.h"
#include "support/operations.h"
#include "support/plan_simulator.h"
#include "support/problem.h"
#include "support/wire_oracle.h"

namespace multiring {
namespace {

using testing::Bytes;
using testing::make_problem;
using testing::ReduceProblem;

/// All ranks of a plan, round by round; `comm_dtype`: of messages that are narrower than what is reduced.
class Ranks {
 public:
  Ranks(const Plan& plan, const ReduceProblem& problem, CommDtype comm_dtype = CommDtype::kFloat32)
      : plan_(plan),
        problem_(problem),
        is_rounded_(is_rounded(comm_dtype)),
        sums_(problem.dtype, problem.reduction, plan.cluster().size()),
        rounded_(rounded_dtype(comm_dtype), problem.reduction, plan.cluster().size()) {
    for (int rank = 0; rank < size(); ++rank) {
      schedules_.push_back(make_schedule(plan, rank));
      memory_.emplace_back(schedules_.back().bytes, std::byte{0xcd});
      add_within_host(rank);
    }
  }

  /// What went wrong; empty: nothing.
  std::string run() {
    const std::size_t rounds = schedules_[0].steps.size();
    for (std::size_t round = 0; round < rounds; ++round) {
      for (int rank = 0; rank < size(); ++rank) {
        if (of(rank).steps.size() != rounds) return "ranks have different numbers of rounds";
        for (const RankSchedule::Message& message : of(rank).steps[round].sends) send(rank, message);
      }
      for (int rank = 0; rank < size(); ++rank) {
        for (const RankSchedule::Message& message : of(rank).steps[round].receives)
          if (!receive(rank, message)) return "rank " + std::to_string(rank) + " waits for another message";
        for (const RankSchedule::Join& join : of(rank).steps[round].joins) add(rank, join);
      }
      for (const auto& [pair, messages] : in_flight_)
        if (!messages.empty()) return "rank " + std::to_string(pair.second) + " did not expect a message";
    }
    return is_rounded_ ? "" : check();
  }

  /// Bytes of all messages.
  std::size_t sent() const { return sent_; }

  /// After run(): the result that the ranks of a host have, as float32.
  Bytes result(const Host& host) {
    Bytes floats(plan_.count() * sizeof(float));
    for (const int rank : host.ranks) {
      const Range share = of(rank).share;
      rounded_.restore(memory(rank, of(rank).result), floats.data() + share.begin * sizeof(float),
                       share.size());
    }
    return floats;
  }

 private:
  int size() const { return plan_.cluster().size(); }
  const RankSchedule& of(int rank) const { return schedules_[static_cast<std::size_t>(rank)]; }
  std::byte* memory(int rank, std::size_t offset) {
    return memory_[static_cast<std::size_t>(rank)].data() + offset;
  }

  void add_within_host(int rank) {
    const auto host =
        static_cast<std::size_t>(plan_.cluster().host_of_rank()[static_cast<std::size_t>(rank)]);
    for (const RankSchedule::Sum& sum : of(rank).host_sums) {
      std::vector<PartialSums::Part> parts;
      std::vector<const std::byte*> inputs;
      for (const int mate : plan_.cluster().hosts[host].ranks) {
        if (mate < sum.node.begin || mate >= sum.node.end) continue;
        const auto* input =
            reinterpret_cast<const std::byte*>(problem_.inputs[static_cast<std::size_t>(mate)].data());
        inputs.push_back(input + of(rank).share.begin * dtype_size(problem_.dtype));
        parts.push_back({{mate, mate + 1}, inputs.back()});
      }
      if (is_rounded_)
        rounded_.contribute(inputs, memory(rank, sum.offset), of(rank).share.size());
      else
        sums_.join(parts, sum.node, memory(rank, sum.offset), of(rank).share.size());
    }
  }

  void send(int rank, const RankSchedule::Message& message) {
    std::vector<std::byte> bytes;
    for (const auto [offset, size] : message.parts)
      bytes.insert(bytes.end(), memory(rank, offset), memory(rank, offset) + size);
    sent_ += bytes.size();
    in_flight_[{rank, message.peer}].push_back(std::move(bytes));
  }

  bool receive(int rank, const RankSchedule::Message& message) {
    auto& messages = in_flight_[{message.peer, rank}];
    if (messages.empty() || message.parts.size() != 1 || messages.front().size() != message.parts[0].size)
      return false;
    std::memcpy(memory(rank, message.parts[0].offset), messages.front().data(), message.parts[0].size);
    messages.pop_front();
    return true;
  }

  void add(int rank, const RankSchedule::Join& join) {
    for (const RankSchedule::Sum& output : join.outputs) {
      std::vector<PartialSums::Part> parts;
      for (const RankSchedule::Sum& input : join.inputs)
        if (output.node.begin <= input.node.begin && input.node.end <= output.node.end)
          parts.push_back({input.node, memory(rank, input.offset)});
      if (is_rounded_)
        rounded_.join(parts, output.node, memory(rank, output.offset), join.range.size());
      else
        sums_.join(parts, output.node, memory(rank, output.offset), join.range.size());
    }
  }

  std::string check() {
    const std::size_t element = dtype_size(problem_.dtype);
    for (const Host& host : plan_.cluster().hosts) {
      std::size_t covered = 0;
      for (std::size_t place = 0; place < host.ranks.size(); ++place) {
        const int rank = host.ranks[place];
        const Range share = of(rank).share;
        if (!(of(rank).host_shares[place] == share)) return "shares of a host differ";
        covered += share.size();
        if (!share.empty() &&
            std::memcmp(memory(rank, of(rank).result), problem_.expected.data() + share.begin * element,
                        share.size() * element) != 0)
          return "rank " + std::to_string(rank) + " has other bits";
      }
      if (covered != plan_.count()) return "a host covers " + std::to_string(covered) + " elements";
    }
    return "";
  }

  const Plan& plan_;
  const ReduceProblem& problem_;
  const bool is_rounded_;
  PartialSums sums_;
  RoundedSums rounded_;
  std::size_t sent_ = 0;
  std::vector<RankSchedule> schedules_;
  std::vector<std::vector<std::byte>> memory_;
  std::map<std::pair<int, int>, std::deque<std::vector<std::byte>>> in_flight_;  // from, to
};

void expect_right(const Cluster& cluster, const Mode& mode, const ReduceProblem& problem) {
  PlanOptions options;
  options.count = problem.count;
  options.dtype = problem.dtype;
  options.mode = mode;
  options.channels = 1;
  const Plan plan(cluster, options);
  EXPECT_EQ(Ranks(plan, problem).run(), "")
      << testing::describe(cluster) << ", mode " << format_mode(plan.mode()) << ", " << problem.text();
}

std::vector<Mode> across_hosts(const Cluster& cluster) {
  std::vector<Mode> modes;
  for (const Algorithm within : {Algorithm::kPairwise, Algorithm::kTree}) {
    for (const Algorithm across : {Algorithm::kPairwise, Algorithm::kDoubling, Algorithm::kTree}) {
      Mode mode = automatic_mode(cluster);
      mode[0].algorithm = within;
      mode[1].algorithm = across;
      modes.push_back(std::move(mode));
    }
  }
  return modes;
}

TEST(PlanSchedule, EveryAlgorithmOnEveryCluster) {
  for (const Cluster& cluster : testing::clusters_to_try()) {
    if (cluster.host_count() == 1) continue;
    for (const std::size_t count : {1, 17, 1003})
      for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
        const ReduceProblem problem =
            make_problem(dtype, {ReduceOp::kAverage, 0.3, 1.7}, count, cluster.size());
        for (const Mode& mode : across_hosts(cluster)) expect_right(cluster, mode, problem);
      }
  }
}

TEST(PlanSchedule, EveryDtypeAndReduction) {
  for (const std::vector<int>& layout : {std::vector{2, 2}, std::vector{3, 1, 2}}) {
    for (const Placement placement : {Placement::kBlocks, Placement::kRoundRobin}) {
      const Cluster cluster = make_cluster(layout, {{1e9, 0.0}}, {}, placement);
      for (const DType dtype : testing::kAllDTypes)
        for (const ReduceOp op : testing::kAllReduceOps) {
          if (!is_floating(dtype) && op == ReduceOp::kAverage) continue;
          for (const double factor : {1.0, 0.7}) {
            if (dtype == DType::kBool && factor != 1.0) continue;
            const Reduction reduction{op, factor, 2 * factor};
            const Reduction plain{op};
            const ReduceProblem problem =
                make_problem(dtype, factor == 1.0 ? plain : reduction, 2500, cluster.size());
            for (const Mode& mode : across_hosts(cluster)) expect_right(cluster, mode, problem);
          }
        }
    }
  }
}

TEST(PlanSchedule, ThreeAndFourDimensions) {
  for (const char* const text :
       {"2x3x2", "1x2x4", "3x2x2", "2x2x2x2", "2tx2x2d", "2x2tx2", "4x1x3", "1x2tx3d"}) {
    const Mode mode = parse_mode(text);
    int hosts = 1;
    for (std::size_t index = 1; index < mode.size(); ++index) hosts *= mode[index].size;
    const std::vector<int> layout(static_cast<std::size_t>(hosts), mode[0].size);
    for (const Placement placement : {Placement::kBlocks, Placement::kRoundRobin}) {
      const Cluster cluster = make_cluster(layout, {{1e9, 0.0}}, {}, placement);
      for (const DType dtype : {DType::kFloat64, DType::kBFloat16})
        for (const std::size_t count : {5, 1003})
          expect_right(cluster, mode, make_problem(dtype, {ReduceOp::kSum}, count, cluster.size()));
    }
  }
}

Plan plan_for(const Cluster& cluster, const Mode& mode, std::size_t count, CommDtype comm_dtype) {
  PlanOptions options;
  options.count = count;
  options.dtype = is_rounded(comm_dtype) ? rounded_dtype(comm_dtype) : DType::kFloat32;
  options.rounded = is_rounded(comm_dtype);
  options.mode = mode;
  options.channels = 1;
  return Plan(cluster, options);
}

// All hosts have the same bits; with one step across hosts those that the description gives. Messages have
// half of the bytes that they have otherwise.
void expect_narrower(const Cluster& cluster, const Mode& mode, const ReduceProblem& problem,
                     CommDtype comm_dtype) {
  const Plan plan = plan_for(cluster, mode, problem.count, comm_dtype);
  const std::string text = testing::describe(cluster) + ", mode " + format_mode(plan.mode());
  Ranks ranks(plan, problem, comm_dtype);
  ASSERT_EQ(ranks.run(), "") << text;
  const Bytes result = ranks.result(cluster.hosts[0]);
  for (const Host& host : cluster.hosts) EXPECT_TRUE(ranks.result(host) == result) << text;
  if (*plan.mode()[1].algorithm == Algorithm::kPairwise) {
    EXPECT_TRUE(result == testing::wire_oracle(comm_dtype, problem, cluster.host_of_rank())) << text;
  }
  if (!cluster.regular()) return;  // the ends of cache lines, and so the shares, are others
  const Plan wide = plan_for(cluster, mode, problem.count, CommDtype::kFloat32);
  Ranks full(wide, problem);
  ASSERT_EQ(full.run(), "");
  EXPECT_EQ(2 * ranks.sent(), full.sent()) << text;
}

TEST(PlanSchedule, NarrowerMessages) {
  for (const std::vector<int>& layout :
       {std::vector{2, 2}, {1, 3}, {3, 1, 2}, {4, 4, 4}, {1, 1}, {2, 2, 2, 2}}) {
    for (const Placement placement : {Placement::kBlocks, Placement::kRoundRobin}) {
      const Cluster cluster = make_cluster(layout, {{1e9, 0.0}}, {}, placement);
      for (const std::size_t count : {1, 17, 1003, 2500}) {
        const ReduceProblem problem =
            make_problem(DType::kFloat32, {ReduceOp::kAverage, 0.3, 1.7}, count, cluster.size());
        for (const Mode& mode : across_hosts(cluster))
          for (const CommDtype comm_dtype : {CommDtype::kBFloat16, CommDtype::kFloat16})
            expect_narrower(cluster, mode, problem, comm_dtype);
      }
    }
  }
}

}  // namespace
}  // namespace multiring
