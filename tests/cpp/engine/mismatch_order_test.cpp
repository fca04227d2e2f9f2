// A mismatch is told as such on every rank: by the call that meets it first, in whatever order this rank, its
// threads and its peers come to know of it.

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "support/named.h"

namespace multiring {
namespace {

using namespace testing;

constexpr int kSize = 3;
constexpr int kOdd = 1;

/// On one host, and on two of which the first has rank 0 only.
GroupOptions options(TransportKind kind) { return {kind, kSize, kSmallStaging}; }

/// Rank kOdd has one element more.
Array array_of(int rank) { return Array(rank == kOdd ? 4 : 3, 1); }

/// Expects the mismatch of the allreduce 'first'.
void expect_told(const Communicator& communicator, const Error& error) {
  expect_kind(error, ErrorKind::kMismatch);
  const ErrorContext& told = error.context();
  EXPECT_EQ(told.rank, communicator.rank()) << error.what();
  EXPECT_EQ(told.peer, communicator.rank() == kOdd ? 0 : kOdd) << error.what();
  EXPECT_EQ(told.operation, "allreduce") << error.what();
  EXPECT_EQ(told.tensor, "first") << error.what();
  EXPECT_FALSE(told.host.empty()) << error.what();
}

/// Returns when the progress thread has met an error, of which nobody has been told.
void await_first_error(const Communicator& communicator) {
  while (!communicator.first_error()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

class MismatchOrder : public ::testing::TestWithParam<TransportKind> {};

// The next call comes after the error, and before anybody has waited for the work that failed. Adapters
// submit one array after the other, while the first is already on its way.
TEST_P(MismatchOrder, TheNextCallRaisesIt) {
  struct Call {
    const char* name;
    std::function<void(Communicator&)> make;
  };
  Array more(5, 1);
  const Call calls[] = {
      {"submit", [&](Communicator& c) { c.submit(sum_in_place(more, "more"), 0, nullptr); }},
      {"run", [](Communicator& c) { run_barrier(c); }},
      {"split", [](Communicator& c) { c.split(0, 0, {}); }},
      {"allocate", [](Communicator& c) { c.allocate_symmetric(100, {}); }},
      {"send",
       [&](Communicator& c) {
         Operation send = send_of(DType::kInt64, 5, more.data(), (c.rank() + 1) % kSize);
         c.send(send, 0, {});
       }},
  };
  for (const Call& call : calls) {
    SCOPED_TRACE(call.name);
    RankGroup group(options(GetParam()));
    group.run([&](Communicator& communicator) {
      Array array = array_of(communicator.rank());
      const auto work = communicator.submit(sum_in_place(array, "first"), 0, nullptr);
      await_first_error(communicator);
      const Error met = error_of(ErrorKind::kMismatch, [&] { call.make(communicator); });
      expect_told(communicator, met);
      expect_text(met, "rank 1 asked for allreduce 'first' sum int64[4, 1]");
      EXPECT_STREQ(error_of_work(ErrorKind::kMismatch, work).what(), met.what());
      // The program has been told.
      error_of(
          ErrorKind::kAborted, [&] { call.make(communicator); },
          "is broken on rank " + std::to_string(communicator.rank()) + " by its first error");
    });
  }
}

TEST_P(MismatchOrder, ACallAfterAWaitSaysThatItIsBroken) {
  RankGroup group(options(GetParam()));
  group.run([&](Communicator& communicator) {
    Array array = array_of(communicator.rank());
    const auto work = communicator.submit(sum_in_place(array, "first"), 0, nullptr);
    expect_told(communicator, error_of_work(ErrorKind::kMismatch, work));
    error_of(ErrorKind::kAborted, [&] { run_barrier(communicator); }, "by its first error");
  });
}

/// Submits other names until the queue refuses one.
Error first_refusal(NamedQueue& queue, Array& array) {
  for (int i = 0;; ++i) {
    try {
      submit(queue, array, numbered("more ", i));
    } catch (const Error& error) {
      return error;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST_P(MismatchOrder, ANamedQueueRefusesWithIt) {
  RankGroup group(options(GetParam()));
  group.run([](Communicator& communicator) {
    const auto queue = queue_over(communicator);
    Array array = array_of(communicator.rank());
    Array more(5, 1);
    const auto work = submit(*queue, array, "first");
    expect_kind(first_refusal(*queue, more), ErrorKind::kMismatch);
    expect_told(communicator, error_of_work(ErrorKind::kMismatch, work));
    error_of(ErrorKind::kAborted, [&] { submit(*queue, more, "late"); }, "by its first error");
  });
}

// A framework reports any of the operations that fail: all of them have to say why.
TEST_P(MismatchOrder, ANamedQueueTellsEachThatHasADone) {
  RankGroup group(options(GetParam()));
  group.run([](Communicator& communicator) {
    const auto queue = queue_over(communicator);
    Array array = array_of(communicator.rank());
    Array more(5, 1);
    Latch done(1);
    queue->submit(sum_of(array, "first", [&](const Error* error, auto) {
      expect_told(communicator, *error);
      done.count_down();
    }));
    done.wait();
    const auto submit_more = [&] { queue->submit(sum_of(more, "more", [](const Error*, auto) { FAIL(); })); };
    for (int i = 0; i < 2; ++i) expect_told(communicator, error_of(ErrorKind::kMismatch, submit_more));
    // Who waits for works has not been told.
    error_of(ErrorKind::kMismatch, [&] { submit(*queue, more, "late"); });
    error_of(ErrorKind::kAborted, [&] { submit(*queue, more, "late"); }, "by its first error");
    expect_told(communicator, error_of(ErrorKind::kMismatch, submit_more));
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, MismatchOrder,
                         ::testing::Values(TransportKind::kInproc, TransportKind::kShm,
                                           TransportKind::kCluster, TransportKind::kClusterMpi,
                                           TransportKind::kClusterRelayed),
                         kPrinted);

// Within a host a rank always sees who has come before it sees their error. From another host an error may
// overtake what the ranks asked for: here a rank learns of nothing else.
class MismatchOvertakes : public ::testing::TestWithParam<TransportKind> {
 protected:
  /// `body` on all ranks, once for each that only learns of it.
  static void for_each_rank(const std::function<void(Communicator&, const std::function<void()>&)>& body) {
    for (int late = 0; late < kSize; ++late) {
      SCOPED_TRACE("rank " + std::to_string(late));
      RankGroup group(options(GetParam()));
      group.run([&](Communicator& communicator) {
        body(communicator, [&] {
          if (communicator.rank() == late) group.withhold_messages(late);
        });
      });
    }
  }
};

TEST_P(MismatchOvertakes, WhatIsCompared) {
  for (const CallMode mode : kCallModes) {
    for_each_rank([mode](Communicator& communicator, const std::function<void()>& withhold) {
      run_barrier(communicator);
      withhold();
      Array array = array_of(communicator.rank());
      const Error error = error_of(
          ErrorKind::kMismatch, [&] { perform(communicator, sum_in_place(array, "first"), mode); },
          "rank 1 asked for allreduce 'first' sum int64[4, 1]");
      expect_told(communicator, error);
    });
  }
}

TEST_P(MismatchOvertakes, WhatANamedQueueMatches) {
  for_each_rank([](Communicator& communicator, const std::function<void()>& withhold) {
    const auto queue = queue_over(communicator);
    run_barrier(communicator);
    withhold();
    Array array(3, 1);
    NamedRequest request = sum_of(array, "first");
    if (communicator.rank() == kOdd)
      request.operations.push_back(std::move(sum_of(array, "first").operations[0]));
    const auto work = queue->submit(std::move(request)).front();
    expect_told(communicator, error_of_work(ErrorKind::kMismatch, work,
                                            "different numbers of operations under the name 'first'"));
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, MismatchOvertakes,
                         ::testing::Values(TransportKind::kCluster, TransportKind::kClusterMpi), kPrinted);

}  // namespace
}  // namespace multiring
