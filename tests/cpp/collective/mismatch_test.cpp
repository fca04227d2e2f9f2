// Whatever the ranks do not agree in raises a mismatch error on all of them that says who asked for what.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/errors.h"
#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

/// One operation and how the odd rank's differs from it.
struct Difference {
  const char* name;
  Request request;
  std::function<void(Request&)> change;
  /// What the message says of the others' and of the odd one's.
  std::string common;
  std::string odd;
};

const std::string kLong(150, 'x');

std::vector<Difference> differences() {
  const Request sum{.rows = 10, .name = "t"};
  const Request long_name{.rows = 10, .name = kLong + "1"};
  const Request broadcast{.kind = OpKind::kBroadcast, .rows = 10, .root = 0, .name = "t"};
  const Request allgather{.kind = OpKind::kAllgather, .rows = 5, .row = 2, .name = "t"};
  const Request barrier{.kind = OpKind::kBarrier};
  const Request scatter{.kind = OpKind::kScatter, .root = 0};
  const Request gather{.kind = OpKind::kGather, .rows = 5, .root = 0};
  const Request reduce_scatter{.kind = OpKind::kReduceScatter, .rows = 14, .name = "t"};
  return {
      {"Name", sum, [](Request& r) { r.name = "u"; }, "allreduce 't' sum float32[10, 1]",
       "allreduce 'u' sum float32[10"},
      {"NoName", sum, [](Request& r) { r.name = ""; }, "allreduce 't' sum", "allreduce sum"},
      {"EndOfALongName", long_name, [](Request& r) { r.name = kLong + "2"; }, "names alike at the start",
       "allreduce 'xxx"},
      {"Kind", sum, [](Request& r) { r.kind = OpKind::kReduceScatter; }, "allreduce 't'",
       "reduce_scatter 't'"},
      {"KindAndBarrier", barrier, [](Request& r) { r = Request{.rows = 3}; }, "barrier",
       "allreduce sum float32[3, 1]"},
      {"Dtype", sum, [](Request& r) { r.dtype = DType::kInt32; }, "float32[10", "int32[10"},
      {"Count", sum, [](Request& r) { r.rows = 11; }, "float32[10, 1]", "float32[11, 1]"},
      {"NoElements", sum, [](Request& r) { r.rows = 0; }, "float32[10, 1]", "float32[0, 1]"},
      {"Reduction", sum, [](Request& r) { r.reduction.op = ReduceOp::kMax; }, "'t' sum", "'t' max"},
      {"Prescale", sum, [](Request& r) { r.reduction.prescale = 0.5; }, "sum float32", "sum prescale 0.5"},
      {"Postscale", sum, [](Request& r) { r.reduction.postscale = 2; }, "sum float32", "sum postscale 2.0"},
      {"CommDtype", sum, [](Request& r) { r.comm_dtype = CommDtype::kBFloat16; }, "sum float32",
       "sum comm_dtype bfloat16 float32"},
      {"Order", sum, [](Request& r) { r.order = Order::kAny; }, "sum float32", "sum in any order float32"},
      {"OrderOfReduceScatter", reduce_scatter, [](Request& r) { r.order = Order::kAny; }, "sum float32",
       "sum in any order float32"},
      {"Root", broadcast, [](Request& r) { r.root = 1; }, "root 0", "root 1"},
      {"RootOfScatter", scatter, [](Request& r) { r.root = 1; }, "scatter root 0", "scatter root 1"},
      {"RootOfGather", gather, [](Request& r) { r.root = 1; }, "gather root 0", "gather root 1"},
      {"RowsOfAllgather", allgather, [](Request& r) { r.row = 3; }, "float32[5, 2]", "float32[5, 3]"},
      {"CountOfReduceScatter", reduce_scatter, [](Request& r) { r.rows = 15; }, "[14, 1]", "[15, 1]"},
      {"RowsOfReduceScatter", reduce_scatter, [](Request& r) { r.rows = 7, r.row = 2; }, "[14, 1]", "[7, 2]"},
  };
}

/// Null if an earlier mismatch, of which nobody has been told, has broken the communicator already.
std::shared_ptr<Work> submitted_unless_broken(Communicator& communicator, Operation operation, int priority,
                                              bool& already_told) {
  try {
    return communicator.submit(std::move(operation), priority, nullptr);
  } catch (const Error& error) {
    expect_kind(error, already_told ? ErrorKind::kAborted : ErrorKind::kMismatch);
    already_told = true;
    return nullptr;
  }
}

struct MismatchCase {
  GroupCase group;
  CallMode mode;
};
void PrintTo(const MismatchCase& mismatch, std::ostream* out) {
  PrintTo(mismatch.group, out);
  *out << (mismatch.mode == CallMode::kAsync ? "_async" : "_sync");
}

class MismatchTest : public ::testing::TestWithParam<MismatchCase> {
 protected:
  static int size() { return GetParam().group.size; }
  static CallMode mode() { return GetParam().mode; }
  /// The rank that differs: the last but one, or the first of two.
  static int odd() { return size() - 2; }

  static void expect_all_raise(const RankGroup::Body& body, const std::vector<std::string>& fragments) {
    RankGroup group(GetParam().group.options());
    const auto outcomes = group.outcomes([&](Communicator& communicator) {
      try {
        body(communicator);
      } catch (const Error& error) {
        EXPECT_TRUE(communicator.is_broken());
        expect_broken(communicator, error);
        throw;
      }
    });
    for (int rank = 0; rank < size(); ++rank) {
      const auto& outcome = outcomes[static_cast<std::size_t>(rank)];
      ASSERT_TRUE(outcome.has_value()) << "nothing was raised on rank " << rank;
      expect_kind(*outcome, ErrorKind::kMismatch);
      EXPECT_EQ(outcome->context().rank, rank) << outcome->what();
      for (const std::string& fragment : fragments) expect_text(*outcome, fragment);
    }
  }

  /// Later calls say that the communicator is broken, and by what.
  static void expect_broken(Communicator& communicator, const Error& first) {
    const auto call = [&] { perform(communicator, barrier_operation(), mode()); };
    for (int repeat = 0; repeat < 2; ++repeat) error_of(ErrorKind::kAborted, call, "is broken", first.what());
  }
};

TEST_P(MismatchTest, EveryKindOfDifference) {
  for (const Difference& difference : differences()) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, difference.name);
    std::vector<std::string> fragments = {difference.common, difference.odd};
    if (std::string(difference.name) != "EndOfALongName") {
      fragments.push_back("rank " + std::to_string(odd()) + " asked for " +
                          (difference.odd.starts_with("all") ? "all" : ""));
      if (size() > 2) fragments.push_back("ranks ");
    }
    expect_all_raise(
        [&](Communicator& communicator) {
          perform(communicator, barrier_operation("before"), mode());
          Request request = difference.request;
          if (communicator.rank() == odd()) difference.change(request);
          std::vector<std::byte> input(request.rows * request.row * 8);
          std::vector<std::byte> output(input.size());
          request.input = input.data();
          if (request.kind == OpKind::kAllreduce || request.kind == OpKind::kBroadcast)
            request.output = output.data();
          perform(communicator, request, mode());
        },
        fragments);
  }
}

TEST_P(MismatchTest, SplitAndAllocateAgainstABarrier) {
  for (const bool split : {false, true}) {
    expect_all_raise(
        [&](Communicator& communicator) {
          if (communicator.rank() != odd()) return run_barrier(communicator);
          if (split) communicator.split(0, 0, {});
          if (!split) communicator.allocate_symmetric(5000, {});
        },
        {"barrier", split ? "split" : "symmetric_empty uint8[5000]"});
  }
}

TEST_P(MismatchTest, SizesOfSymmetricMemory) {
  expect_all_raise(
      [&](Communicator& communicator) {
        communicator.allocate_symmetric(communicator.rank() == odd() ? 4096 : 8192, {});
      },
      {"symmetric_empty uint8[4096]", "symmetric_empty uint8[8192]"});
}

/// Memory for the rows of all ranks, of which one rank has too little: all are told so, and of the same rank.
TEST_P(MismatchTest, RoomForTheRowsOfAllRanks) {
  const auto ranks = static_cast<std::size_t>(size());
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kAlltoall, OpKind::kGather}) {
    RankGroup group(GetParam().group.options());
    const auto outcomes = group.outcomes([&](Communicator& communicator) {
      const std::vector<float> x(2 * ranks);
      std::vector<float> out(x.size() * ranks);
      Request request{.kind = kind, .rows = x.size(), .input = x.data(), .output = out.data()};
      request.root = kind == OpKind::kGather ? odd() : -1;
      if (kind == OpKind::kAlltoall) request.splits.assign(ranks, 2);
      request.output_bytes = sizeof(float) * (kind == OpKind::kAlltoall ? x.size() : out.size());
      if (communicator.rank() == odd()) request.output_bytes -= sizeof(float);
      perform(communicator, request, mode());
    });
    expect_all_raised(outcomes, ErrorKind::kMismatch, "rank " + std::to_string(odd()) + ": out of",
                      "omit out to have it allocated");
    for (int rank = 0; rank < size(); ++rank) {
      const int common = odd() == 0 ? 1 : 0;
      EXPECT_EQ(outcomes[static_cast<std::size_t>(rank)]->context().peer, rank == odd() ? common : odd());
    }
  }
}

// The same operation, but not in the same way: whether it would match depended on timing.
TEST_P(MismatchTest, SynchronousAgainstAsynchronous) {
  expect_all_raise(
      [&](Communicator& communicator) {
        float value = 1;
        const CallMode own = communicator.rank() == odd() ? CallMode::kSync : CallMode::kAsync;
        perform(communicator, allreduce_of(DType::kFloat32, 1, &value, &value, "t"), own);
      },
      {"allreduce 't' sum float32[1, 1]", "(asynchronous operation 1)"});
}

TEST_P(MismatchTest, AnotherOrder) {
  expect_all_raise(
      [&](Communicator& communicator) {
        std::vector<float> first(10);
        std::vector<float> second(10);
        Operation a = allreduce_of(DType::kFloat32, 10, first.data(), first.data(), "a");
        Operation b = allreduce_of(DType::kFloat32, 10, second.data(), second.data(), "b");
        if (communicator.rank() == odd()) std::swap(a, b);
        if (mode() == CallMode::kSync) {
          communicator.run(a, {});
          return communicator.run(b, {});
        }
        const auto work = communicator.submit(std::move(a), 0, nullptr);
        bool told = false;
        const auto more = submitted_unless_broken(communicator, std::move(b), 0, told);
        work->wait(Deadline::never(), {});
        if (more) more->wait(Deadline::never(), {});
      },
      {"'a", "'b"});
}

// Asynchronous ones without names that differ in their priorities only, so that the ranks choose different
// ones.
TEST_P(MismatchTest, PrioritiesOfNamelessWork) {
  if (mode() == CallMode::kSync) return;
  RankGroup group(GetParam().group.options());
  group.outcomes([&](Communicator& communicator) {
    std::vector<Array> arrays;
    for (std::int64_t i = 0; i < 8; ++i) arrays.emplace_back(10000, i);  // too long to be fused
    std::vector<std::shared_ptr<Work>> works;
    bool told = false;
    for (auto& array : arrays) {
      const auto priority = static_cast<int>(works.size()) * (communicator.rank() == odd() ? -1 : 1);
      auto operation = sum_in_place(array);
      if (auto work = submitted_unless_broken(communicator, std::move(operation), priority, told))
        works.push_back(work);
    }
    // How many of them are right depends on when the ranks come; none may be wrong.
    for (std::size_t i = 0; i < works.size(); ++i) {
      try {
        works[i]->wait(Deadline::never(), {});
        EXPECT_EQ(arrays[i][77], static_cast<std::int64_t>(i) * size());
      } catch (const Error& error) {
        expect_kind(error, ErrorKind::kMismatch);
      }
    }
  });
}

// One of several that may be fused; the ranks see it alone or together with its neighbours.
TEST_P(MismatchTest, OneOfManyPending) {
  if (mode() == CallMode::kSync) return;
  expect_all_raise(
      [&](Communicator& communicator) {
        std::vector<std::vector<float>> arrays(12, std::vector<float>(20));
        std::vector<std::shared_ptr<Work>> works;
        bool told = false;
        for (std::size_t i = 0; i < arrays.size(); ++i) {
          const std::size_t count = i == 7 && communicator.rank() == odd() ? 19 : 20;
          auto operation = allreduce_of(DType::kFloat32, count, arrays[i].data(), arrays[i].data(),
                                        "g" + std::to_string(i));
          if (auto work = submitted_unless_broken(communicator, std::move(operation), 0, told))
            works.push_back(work);
        }
        std::optional<Error> last;
        for (const auto& work : works) {
          try {
            work->wait(Deadline::never(), {});
            EXPECT_FALSE(last.has_value()) << "work after the one that failed was done";
          } catch (const Error& error) {
            last = error;
          }
        }
        ASSERT_TRUE(last.has_value());
        throw *last;
      },
      {"asked for"});
}

std::vector<MismatchCase> mismatch_cases() {
  std::vector<MismatchCase> cases;
  for (const GroupCase& group : group_cases({2, 3, 7}, {kSmallStaging}))
    for (const CallMode mode : kCallModes) cases.push_back({group, mode});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Groups, MismatchTest, ::testing::ValuesIn(mismatch_cases()), kPrinted);

TEST(PointToPointMismatch, TagDtypeAndLength) {
  for (int difference = 0; difference < 3; ++difference) {
    for (const TransportKind transport : kTransports) {
      RankGroup group(GroupOptions(transport, 3));
      const auto outcomes = group.outcomes([&](Communicator& communicator) {
        std::vector<float> array(10);
        Operation send = send_of(DType::kFloat32, 10, array.data(), 1, "sent");
        if (communicator.rank() == 0) communicator.send(send, 4, {});
        Request request{.kind = OpKind::kReceive, .rows = 10, .output = array.data(), .root = 0};
        if (difference == 0) request.dtype = DType::kInt32;
        if (difference == 1) request.rows = 9;
        Operation receive = make_operation(request);
        if (communicator.rank() == 1) communicator.receive(receive, difference == 2 ? 5 : 4, {});
        run_barrier(communicator);  // where the others learn of it
      });
      const char* const fragments[] = {"int32[10, 1]", "float32[9, 1]", "tag 5"};
      expect_all_raised(outcomes, ErrorKind::kMismatch, "rank 0 sent tag 4 send 'sent'",
                        fragments[difference]);
    }
  }
}

}  // namespace
}  // namespace multiring
