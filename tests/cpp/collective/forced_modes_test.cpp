// Every mode of an allreduce, between hosts and within one, gives the bits of the canonical tree, whatever
// the array; and ranks run what is asked for.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "collective/collectives.h"
#include "engine/symmetric_registry.h"
#include "support/errors.h"
#include "support/modes.h"
#include "support/operations.h"
#include "topology/chunks.h"

namespace multiring {
namespace {

using namespace testing;

/// Where the arrays of the ranks lie. Mixed: those of every other rank in memory of its own.
enum class Place { kOrdinary, kSymmetric, kMixed };
constexpr Place kPlaces[] = {Place::kOrdinary, Place::kSymmetric, Place::kMixed};

/// What runs allreduces on one rank, one at a time, and counts how often ranks synchronise.
class Reducer {
 public:
  Reducer(Transport& transport, const CommunicatorOptions& options, std::size_t most_bytes)
      : transport_(transport),
        exchange_(transport, "world"),
        symmetric_(transport.rank()),
        region_(transport.allocate(most_bytes, 1, {})),
        ordinary_(most_bytes) {
    symmetric_.add(region_);
    if (!options.mode.empty()) exchange_.plans().force(parse_algorithm(options.mode), transport);
    exchange_.plans().set_tuning(Tuning::parse(options.tuning), transport);
  }

  int rank() const { return transport_.rank(); }
  const HostChoice& choice() { return exchange_.plans().host_choice(transport_, Collective::kAllreduce); }

  /// An allreduce in place. Returns how often ranks have synchronised.
  std::uint64_t reduce(const ReduceProblem& problem, Place place) {
    const bool is_symmetric = place == Place::kSymmetric || (place == Place::kMixed && rank() % 2 == 0);
    std::byte* const array =
        is_symmetric ? region_->part(rank()) : reinterpret_cast<std::byte*>(ordinary_.data());
    std::ranges::copy(std::as_bytes(std::span(problem.input(rank()))), array);
    Operation operation = reduction_of(problem, array, array);
    symmetric_.locate_buffers(operation, transport_.shares_memory());
    const std::uint64_t rounds = run(operation);
    expect_result(problem, array, rank());
    return rounds;
  }

  std::uint64_t reduce_in_pieces(const ReduceProblem& problem) {
    Bytes in_place = problem.input(rank());
    Bytes output(in_place.size(), 0xcd);
    Operation operation = reduction_of(problem, nullptr, nullptr);
    operation.pieces = pieces_of(problem, rank(), in_place, output);
    const std::uint64_t rounds = run(operation);
    EXPECT_TRUE(output_of(operation.pieces) == problem.expected)
        << problem.text() << " in pieces, on rank " << rank();
    return rounds;
  }

  /// Of the same dtype and reduction, which is no average of integers.
  std::uint64_t reduce_fused(const std::vector<const ReduceProblem*>& problems) {
    std::vector<Bytes> arrays;
    std::vector<Operation> operations;
    for (const ReduceProblem* const problem : problems) {
      arrays.push_back(problem->input(rank()));
      operations.push_back(reduction_of(*problem, arrays.back().data(), arrays.back().data(), "part"));
    }
    std::vector<Operation*> pointers;
    for (Operation& operation : operations) pointers.push_back(&operation);
    const Descriptor fused = fused_descriptor(pointers);
    const std::uint64_t before = exchange_.round();
    fused_allreduce(exchange_, OperationCall{fused, {}}, pointers);
    for (std::size_t i = 0; i < problems.size(); ++i) expect_result(*problems[i], arrays[i].data(), rank());
    return exchange_.round() - before;
  }

  /// Fills this rank's staging memory, of rounds of either parity.
  void mark_staging() {
    const Operation barrier = barrier_operation();
    for (int parity = 0; parity < 2; ++parity)
      exchange_.match(OperationCall{barrier.descriptor, {}}, barrier.descriptor,
                      [&] { std::memset(exchange_.staging(rank()), kMark, transport_.staging_bytes()); });
  }
  /// Whether nothing has been written there since.
  bool staging_is_untouched() const {
    for (const std::uint64_t round : {exchange_.round(), exchange_.round() + 1}) {
      const std::byte* const begin = transport_.staging(rank(), round);
      if (std::any_of(begin, begin + transport_.staging_bytes(),
                      [](std::byte byte) { return byte != std::byte{kMark}; }))
        return false;
    }
    return true;
  }

 private:
  static constexpr unsigned char kMark = 0xa5;

  std::uint64_t run(Operation& operation) {
    const std::uint64_t before = exchange_.round();
    allreduce(exchange_, OperationCall{operation.descriptor, {}}, operation);
    return exchange_.round() - before;
  }

  Transport& transport_;
  Exchange exchange_;
  SymmetricRegistry symmetric_;
  const std::shared_ptr<SymmetricRegion> region_;
  Bytes ordinary_;
};

/// Averages, integers that are added in wider ones among them, and scaled sums in half precision, of each of
/// `counts`.
std::vector<ReduceProblem> problems_of(const std::vector<std::size_t>& counts, int size) {
  std::vector<ReduceProblem> problems;
  for (const auto& [dtype, reduction] : {std::pair(DType::kFloat32, Reduction{ReduceOp::kAverage}),
                                         std::pair(DType::kFloat16, Reduction{ReduceOp::kAverage}),
                                         std::pair(DType::kBFloat16, Reduction{ReduceOp::kSum, 0.5, 3.0}),
                                         std::pair(DType::kInt8, Reduction{ReduceOp::kAverage})})
    for (const std::size_t count : counts) problems.push_back(make_problem(dtype, reduction, count, size));
  return problems;
}

std::size_t most_bytes(const std::vector<ReduceProblem>& problems) {
  return std::ranges::max_element(problems, {}, &ReduceProblem::bytes)->bytes();
}

/// Calls body(fused) for those of each dtype that can be added in one pass.
template <class Body>
void for_each_fused(const std::vector<ReduceProblem>& problems, const Body& body) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    std::vector<const ReduceProblem*> fused;
    for (const ReduceProblem& problem : problems)
      if (problem.dtype == dtype) fused.push_back(&problem);
    body(fused);
  }
}

void expect_same_bits(const GroupOptions& options, const std::vector<std::size_t>& counts) {
  const std::vector<ReduceProblem> problems = problems_of(counts, options.size);
  const std::string trace =
      "mode '" + options.communicator.mode + "', tuning '" + options.communicator.tuning + "'";
  RankGroup(options).run([&](Communicator& communicator) {
    SCOPED_TRACE(trace);
    for (const ReduceProblem& problem : problems)
      for (const CallMode mode : kCallModes) expect_reduced(communicator, problem, mode);
  });
  RankGroup(options).run_transports([&](const std::shared_ptr<Transport>& transport) {
    SCOPED_TRACE(trace);
    Reducer reducer(*transport, options.communicator, most_bytes(problems));
    for (const ReduceProblem& problem : problems) reducer.reduce_in_pieces(problem);
    for_each_fused(problems, [&](const auto& fused) { reducer.reduce_fused(fused); });
  });
}

// Every algorithm in either dimension, on hosts that are, and are not, subtrees of the sum; more dimensions;
// and what is chosen where hosts differ, for which no mode can be asked.
TEST(ForcedModes, EveryAlgorithmHasTheSameBits) {
  struct Case {
    std::vector<int> layout;  // empty: two hosts have the ranks 0, 3 and 1, 2
    std::string mode;
  };
  std::vector<Case> cases = {{{}, "2tx2t"},
                             {{}, "2tx2d"},
                             {{}, "2rx2r"},
                             {{1, 1, 1, 1}, "1x2x2"},
                             {{1, 1, 1, 1}, "1x2tx2d"},
                             {{2, 2, 2}, "2tx3t"},
                             {{1, 1, 1, 1, 1, 1}, "1x2tx3d"},
                             {{2, 2, 2, 2}, "2tx2cx2c"},
                             {{2, 2, 2, 2}, "2tx2x2d"},
                             {{2, 2, 2, 2, 2, 2}, "2x3x2"},
                             {{1, 1, 1, 1, 1, 1, 1, 1}, "1x2x2x2d"},
                             {{3, 1, 2}, ""},
                             {{1, 3}, ""},
                             {{4, 3, 2, 1}, ""}};
  for (const Case& pattern :
       {Case{{}, "2x2?"}, Case{{}, "2?x2"}, Case{{1, 1, 1, 1}, "1x4?"}, Case{{2, 2, 2}, "2x3?"},
        Case{{3, 3}, "3?x2"}, Case{{1, 1, 1, 1, 1, 1, 1}, "1x7?"}, Case{{2, 2, 2, 2}, "2tx2?x2"}})
    for (const std::string& mode : modes_of_all(pattern.mode, Order::kCanonical))
      cases.push_back({pattern.layout, mode});
  for (const Case& each : cases) {
    const int size = each.layout.empty() ? 4 : std::accumulate(each.layout.begin(), each.layout.end(), 0);
    GroupOptions options(TransportKind::kCluster, size, 4096);
    options.layout = each.layout;
    options.communicator.mode = each.mode;
    expect_same_bits(options, {0, 1, 37, 20001});
  }
}

TEST(ForcedModes, OnesThatDoNotFitAreRefused) {
  for (const char* const mode : {"4", "2x3", "1x4", "2xx2", "2dx2"}) {
    GroupOptions options(TransportKind::kCluster, 4, 4096);
    options.communicator.mode = mode;
    SCOPED_TRACE(mode);
    error_of(ErrorKind::kUsage, [&] { RankGroup(options).run([](Communicator&) {}); });
  }
}

// Every size has another algorithm, and fused ones have that of their sum of bytes.
TEST(TunedBySize, EveryAlgorithmHasTheSameBits) {
  struct Case {
    int hosts;
    const char* tuning;
  };
  for (const Case& each :
       {Case{2, "0-8 rounds\n0-200 2tx2d\n0-5000 2px2p/64\n0-20000 2x2t/1K\n0-50000 rounds\n0- 2x2/500"},
        Case{4, "0-4 1x4d\n0-200 rounds\n0-20000 1x4t\n0- 1x2x2d/2048"},
        Case{3, "0-200 rounds\n0-5000 2tx3d/100\n0-20000 2x3\n0- rounds"},
        Case{2, "costs message_seconds=1 latency=1"}, Case{4, "costs shared_bytes_per_second=1"}}) {
    GroupOptions options(TransportKind::kCluster, 4, 4096);
    options.hosts = each.hosts;
    options.communicator.tuning = each.tuning;
    expect_same_bits(options, {0, 1, 37, 1000, 4000, 11000, 20001});
  }
}

/// How often the ranks of a host synchronise by a mode (empty: as `choice` says), and whether they leave
/// staging memory alone.
struct Expected {
  std::uint64_t rounds = 0;
  bool is_direct = false;
};
Expected expected_within_host(const std::string& mode, const HostChoice& choice, std::size_t bytes,
                              Place place) {
  const std::size_t segments = std::max<std::size_t>(segment_count(bytes, kSmallStaging), 1);
  const std::size_t min_direct = mode == "direct" ? kMinSymmetricBytes : choice.min_direct;
  const bool looks = mode != "rounds" && mode != "staged" && bytes >= min_direct;
  if (looks && place == Place::kSymmetric) return {2, true};
  const bool in_rounds = bytes == 0 || mode == "rounds" || (mode.empty() && bytes <= choice.max_rounds);
  // Those with symmetric arrays stage nothing before they know of the others.
  const std::size_t again = looks && place == Place::kMixed ? 1 : 0;
  return {(in_rounds ? segments : segments + 1) + again, false};
}

/// On one rank: every problem, wherever arrays lie.
void expect_runs_within_host(Reducer& reducer, const std::vector<ReduceProblem>& problems,
                             const std::string& mode, int size) {
  const HostChoice& choice = reducer.choice();
  for (const ReduceProblem& problem : problems) {
    // Averages of integers are sums of int64, in memory of their own.
    const bool is_widened = problem.dtype == DType::kInt8;
    const std::size_t bytes = problem.bytes() * (is_widened ? sizeof(std::int64_t) : 1);
    for (const Place place : kPlaces) {
      const Expected expected =
          expected_within_host(mode, choice, bytes, is_widened ? Place::kOrdinary : place);
      reducer.mark_staging();
      EXPECT_EQ(reducer.reduce(problem, place), size == 1 ? 0 : expected.rounds)
          << problem.text() << ", place " << static_cast<int>(place);
      if (expected.is_direct || size == 1) {
        EXPECT_TRUE(reducer.staging_is_untouched()) << problem.text();
      }
    }
    EXPECT_EQ(reducer.reduce_in_pieces(problem),
              size == 1 ? 0 : expected_within_host(mode, choice, bytes, Place::kOrdinary).rounds);
  }
  for_each_fused(problems, [&](const std::vector<const ReduceProblem*>& fused) {
    std::size_t bytes = 0;
    for (const ReduceProblem* const problem : fused) bytes += problem->bytes();
    EXPECT_EQ(reducer.reduce_fused(fused),
              expected_within_host(size == 1 ? "rounds" : mode, choice, bytes, Place::kOrdinary).rounds);
  });
}

// Ordinary, symmetric and mixed arrays, in place, in pieces and fused, of no element, of one, of as many as
// are looked for in symmetric memory and of one less, and of several segments and a rest.
TEST(ForcedModes, RanksOfAHostRunWhatIsAskedFor) {
  const std::vector<std::size_t> counts = {0, 1, 127, 128, 3 * kSmallStaging / sizeof(float) + 9};
  for (const int size : {1, 2, 3, 4, 7}) {
    const std::vector<ReduceProblem> problems = problems_of(counts, size);
    for (const TransportKind kind : {TransportKind::kInproc, TransportKind::kShm})
      for (const std::string& mode : {std::string("rounds"), std::string("staged"), std::string("direct"),
                                      std::string(), std::to_string(size) + "p"}) {
        const std::string runs = mode.ends_with('p') ? "" : mode;  // modes of plans are for several hosts
        GroupOptions options(kind, size, kSmallStaging);
        options.communicator.mode = mode;
        RankGroup(options).run_transports([&](const std::shared_ptr<Transport>& transport) {
          SCOPED_TRACE(std::string(transport_name(kind)) + ", mode '" + mode + "'");
          Reducer reducer(*transport, options.communicator, most_bytes(problems));
          expect_runs_within_host(reducer, problems, runs, size);
        });
      }
  }
}

// Where ranks outnumber the cores, and where they do not.
TEST(ForcedModes, RanksOfAHostChangeWhereTheTableSays) {
  constexpr int kRanks = 3;
  for (const int cores : {1, kRanks}) {
    GroupOptions options(TransportKind::kInproc, kRanks);
    options.cores = cores;
    HostChoice choice;
    RankGroup(options).run_transports([&](const std::shared_ptr<Transport>& transport) {
      PlanCache plans;
      if (transport->rank() == 0) choice = plans.host_choice(*transport, Collective::kAllreduce);
    });
    const std::size_t most = choice.max_rounds / sizeof(float);
    const std::size_t least = (choice.min_direct + sizeof(float) - 1) / sizeof(float);
    const auto problem = [](std::size_t count) {
      return make_problem(DType::kFloat32, {ReduceOp::kSum}, count, kRanks);
    };
    const ReduceProblem in_rounds = problem(most);
    const ReduceProblem staged = problem(most + 1);
    const ReduceProblem symmetric[] = {problem(least - 1), problem(least)};
    RankGroup(options).run_transports([&](const std::shared_ptr<Transport>& transport) {
      Reducer reducer(*transport, options.communicator, std::max(staged.bytes(), symmetric[1].bytes()));
      EXPECT_EQ(reducer.reduce(in_rounds, Place::kOrdinary), 1U);
      EXPECT_EQ(reducer.reduce(staged, Place::kOrdinary), 2U);
      for (const std::size_t index : {0, 1}) {
        reducer.mark_staging();
        reducer.reduce(symmetric[index], Place::kSymmetric);
        EXPECT_EQ(reducer.staging_is_untouched(), index == 1) << symmetric[index].text();
      }
    });
  }
}

}  // namespace
}  // namespace multiring
