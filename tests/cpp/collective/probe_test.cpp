// Messages of any source: which is told, who may leave meanwhile, and how a wait for one ends otherwise.

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "support/errors.h"
#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

using Numbers = std::vector<std::int64_t>;
constexpr std::size_t kLong = 50000;  // elements: more than a mailbox holds, so a send waits for its receive

void send(Communicator& communicator, int destination, const Numbers& numbers, std::int64_t tag) {
  Operation operation = send_of(DType::kInt64, numbers.size(), numbers.data(), destination);
  communicator.send(operation, tag, {});
}

Numbers receive(Communicator& communicator, const MessageInfo& message) {
  Numbers numbers(message.shape.empty() ? 0 : message.shape[0]);
  Request request{.kind = OpKind::kReceive, .dtype = DType::kInt64, .rows = numbers.size()};
  request.output = numbers.data();
  request.output_bytes = numbers.size() * sizeof(std::int64_t);
  request.root = message.source;
  Operation operation = make_operation(request);
  communicator.receive(operation, message.tag, {});
  return numbers;
}

/// The next message of any source.
MessageInfo probe(Communicator& communicator, const CallOptions& options = {}) {
  const auto found = communicator.probe({}, options);
  EXPECT_TRUE(found.has_value());
  return found.value_or(MessageInfo{});
}

/// Nothing can be received now.
void expect_none(Communicator& communicator, double seconds = 0.05) {
  error_of(ErrorKind::kTimeout, [&] { communicator.probe({}, {seconds, nullptr}); });
  EXPECT_FALSE(communicator.is_broken());
}

class ProbeTest : public GroupTest {};

TEST_P(ProbeTest, TakesWhatComesFirst) {
  constexpr int kMessages = 20;
  group_.run([](Communicator& communicator) {
    const int rank = communicator.rank();
    const auto content = [](int source, int index) {
      return Numbers(index % 5 == 4 ? kLong : static_cast<std::size_t>(index), 100 * source + index);
    };
    if (rank > 0) {
      for (int index = 0; index < kMessages; ++index)
        send(communicator, 0, content(rank, index), 7 * rank + index);
      return;
    }
    std::vector<int> next(static_cast<std::size_t>(communicator.size()));
    for (int left = kMessages * (communicator.size() - 1); left > 0; --left) {
      const MessageInfo message = probe(communicator);
      const int index = next[static_cast<std::size_t>(message.source)]++;
      const Numbers expected = content(message.source, index);
      EXPECT_EQ(message.tag, 7 * message.source + index);
      EXPECT_EQ(message.dtype, DType::kInt64);
      EXPECT_EQ(message.shape, (std::vector<std::uint64_t>{expected.size(), 1}));
      EXPECT_EQ(receive(communicator, message), expected);
    }
    expect_none(communicator, 0.0);
  });
}

TEST_P(ProbeTest, BesideOtherReceivesAndCollectives) {
  group_.run([](Communicator& communicator) {
    const int last = communicator.size() - 1;
    const std::jthread messages([&] {
      if (communicator.rank() == last) {
        send(communicator, 0, Numbers(kLong, 1), 1);
        send(communicator, 0, {2}, 2);
      }
      if (communicator.rank() != 0) return;
      const MessageInfo first = probe(communicator);
      EXPECT_EQ(first.tag, 1);
      const std::jthread other([&] { EXPECT_EQ(receive(communicator, first), Numbers(kLong, 1)); });
      // While that one is told, and then received, by another thread.
      const MessageInfo second = probe(communicator);
      EXPECT_EQ(second.tag, 2);
      EXPECT_EQ(receive(communicator, second), Numbers{2});
    });
    for (int repeat = 0; repeat < 30; ++repeat) {
      Array ones(5000, 1);
      run(communicator, sum_in_place(ones));
      EXPECT_EQ(ones, Array(5000, communicator.size()));
    }
  });
}

TEST_P(ProbeTest, EachIsToldOnce) {
  group_.run([](Communicator& communicator) {
    if (communicator.rank() == 1) {
      send(communicator, 0, {1}, 1);
      send(communicator, 0, {2}, 2);
    }
    if (communicator.rank() != 0) return;
    const MessageInfo first = probe(communicator);
    for (const std::vector<int>& sources : {std::vector<int>{}, {1}})
      error_of(
          ErrorKind::kTimeout, [&] { communicator.probe({sources, {}}, {0.0, nullptr}); },
          "rank 1 has sent a message with tag 1", "receive it first");
    EXPECT_FALSE(communicator.is_broken());
    EXPECT_EQ(receive(communicator, first), Numbers{1});
    EXPECT_EQ(receive(communicator, probe(communicator)), Numbers{2});
  });
}

TEST_P(ProbeTest, WhatWasToldOutlivesItsSource) {
  Latch told(1);
  Latch left(1);
  group_.outcomes([&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      send(communicator, 0, {1}, 1);
      told.wait();
      communicator.close();
      left.count_down();
    }
    if (communicator.rank() != 0) return;
    const MessageInfo message = probe(communicator);
    told.count_down();
    left.wait();
    expect_none(communicator);
    EXPECT_EQ(receive(communicator, message), Numbers{1});
    error_of(ErrorKind::kPeerLost, [&] { communicator.probe({{1}, {}}, {}); });
  });
}

// A rank that leaves is not missed as long as another one can send.
TEST_P(ProbeTest, RanksThatLeave) {
  std::deque<Latch> left;
  std::deque<Latch> noted;
  for (int rank = 0; rank <= size(); ++rank) {
    left.emplace_back(1);
    noted.emplace_back(rank == size() ? 0 : 1);
  }
  group_.outcomes([&](Communicator& communicator) {
    const int rank = communicator.rank();
    if (rank > 0) {  // from the last rank on, one after the other
      noted[static_cast<std::size_t>(rank) + 1].wait();
      send(communicator, 0, {rank}, rank);
      communicator.close();
      return left[static_cast<std::size_t>(rank)].count_down();
    }
    for (int source = size() - 1; source > 0; --source) {
      const MessageInfo message = probe(communicator);
      EXPECT_EQ(message.source, source);
      EXPECT_EQ(receive(communicator, message), Numbers{source});
      left[static_cast<std::size_t>(source)].wait();
      if (source > 1) expect_none(communicator);
      noted[static_cast<std::size_t>(source)].count_down();
    }
    const Error error = error_of(ErrorKind::kPeerLost, [&] { probe(communicator); });
    expect_text(error, size() == 2 ? "has shut down" : "all of them have left");
    EXPECT_TRUE(communicator.is_broken());
  });
}

// But one whose message is waited for by itself is.
TEST_P(ProbeTest, RanksThatAreNeeded) {
  if (size() < 3) return;
  Latch noticed(1);
  group_.outcomes([&](Communicator& communicator) {
    if (communicator.rank() == 2) communicator.close();
    if (communicator.rank() == 0) {
      const Error error = error_of(ErrorKind::kPeerLost, [&] { communicator.probe({{}, {2}}, {}); });
      EXPECT_EQ(error.context().peer, 2);
      noticed.count_down();
    }
    noticed.wait();
  });
}

TEST_P(ProbeTest, StoppedByAnotherThread) {
  group_.run([](Communicator& communicator) {
    if (communicator.rank() != 0) return;
    std::atomic<bool> stopped{false};
    const std::jthread other([&] {
      stopped = true;  // before the wait, or in it: the same
      communicator.wake();
    });
    EXPECT_FALSE(communicator.probe({{}, {}, &stopped}, {}).has_value());
    EXPECT_FALSE(communicator.probe({{1}, {}, &stopped}, {}).has_value());
    EXPECT_FALSE(communicator.is_broken());
  });
}

TEST_P(ProbeTest, EndsWithTheCommunicator) {
  group_.outcomes([&](Communicator& communicator) {
    if (communicator.rank() == 1) return communicator.abort("the test has it");
    error_of(ErrorKind::kAborted, [&] { probe(communicator); }, "the test has it");
  });
  group_.outcomes([&](Communicator& communicator) {
    if (communicator.rank() != 0) return;
    const std::jthread closer([&] { communicator.close(); });
    error_of(ErrorKind::kAborted, [&] { probe(communicator); }, "closed");
  });
}

std::vector<GroupCase> probe_cases() {
  std::vector<GroupCase> cases = group_cases({2, 3, 5}, {kSmallStaging});
  cases.push_back({TransportKind::kClusterMpi, 4, kSmallStaging});
  return cases;
}
INSTANTIATE_TEST_SUITE_P(Groups, ProbeTest, ::testing::ValuesIn(probe_cases()), kPrinted);

// Of several that have sent, each gets its turn.
TEST(Probe, NoSourceIsAlwaysLast) {
  RankGroup group(GroupOptions(TransportKind::kInproc, 3));
  group.run([](Communicator& communicator) {
    if (communicator.rank() > 0)
      for (const std::int64_t number : {1, 2}) send(communicator, 0, {number}, 0);
    run_barrier(communicator);
    if (communicator.rank() != 0) return;
    std::set<int> sources;
    const std::atomic<bool> stopped{true};
    for (int times = 0; times < 2; ++times) {
      const MessageInfo message = probe(communicator);
      receive(communicator, message);
      sources.insert(message.source);
      EXPECT_FALSE(communicator.probe({{}, {}, &stopped}, {}).has_value());  // which is nobody's turn
    }
    EXPECT_EQ(sources, (std::set{1, 2}));
  });
}

// The message that is waited for may be that of a rank that has died.
TEST(Probe, RanksThatDie) {
  RankGroup group(GroupOptions(TransportKind::kInproc, 4));
  group.outcomes([&](Communicator& communicator) {
    if (communicator.rank() == 2) return group.hub().break_rank(2);
    const Error error = error_of(ErrorKind::kPeerLost, [&] { probe(communicator); }, "rank 2");
    EXPECT_EQ(error.context().peer, 2);
  });
}

// Nor is it hidden by what the rank has sent before.
TEST(Probe, RanksThatDieAfterTheirMessageWasTold) {
  RankGroup group(GroupOptions(TransportKind::kInproc, 3));
  Latch told(1);
  group.outcomes([&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      send(communicator, 0, {1}, 1);
      told.wait();
      group.hub().break_rank(1);
    }
    if (communicator.rank() != 0) return;
    probe(communicator);
    told.count_down();
    const Error error = error_of(ErrorKind::kPeerLost, [&] { probe(communicator); }, "rank 1");
    EXPECT_EQ(error.context().peer, 1);
  });
}

TEST(Probe, ASourceThatIsNamedTwice) {
  RankGroup group(GroupOptions(TransportKind::kInproc, 2));
  group.outcomes([](Communicator& communicator) {
    if (communicator.rank() == 1) return communicator.close();
    error_of(ErrorKind::kPeerLost, [&] { communicator.probe({{1, 1}, {}}, {}); });
  });
}

// Ranks that an error has stopped leave at once, and the error may arrive last.
TEST(Probe, AnErrorIsNotTakenForTheEndOfAll) {
  RankGroup group(GroupOptions(TransportKind::kInproc, 3));
  Latch aborted(1);
  group.run_transports([&](const std::shared_ptr<Transport>& transport) {
    if (transport->rank() == 1) {
      transport->abort(Error(ErrorKind::kMismatch, "the test has it"));
      aborted.count_down();
    }
    if (transport->rank() != 0) return;
    aborted.wait();
    const Exchange exchange(*transport, "world");
    AnySource any({1, 2}, {}, [] { return false; }, [](int, bool) { return true; });
    using Outcome = WaitResult::Outcome;
    EXPECT_TRUE(any.note_end({Outcome::kPeerLost, 1, true}).ok());
    EXPECT_FALSE(any.note_end({Outcome::kPeerLost, 2, true}).ok());
    Operation operation;
    operation.descriptor.key.kind = OpKind::kReceive;
    const OperationCall call{operation.descriptor, {}};
    for (const Outcome outcome : {Outcome::kAborted, Outcome::kPeerLost})
      error_of(
          ErrorKind::kMismatch, [&] { exchange.throw_for_any(call, {outcome, 2, true}, any, ""); },
          "rank 1 stopped all ranks: the test has it");
  });
}

TEST(Probe, RanksOfOtherHostsThatAnErrorHasStopped) {
  GroupOptions options(TransportKind::kCluster, 3);
  options.layout = {1, 1, 1};
  for (int repetition = 0; repetition < 10; ++repetition) {
    RankGroup group(options);
    Latch aborted(1);
    group.outcomes([&](Communicator& communicator) {
      if (communicator.rank() == 1) {
        communicator.abort("the test has it");
        aborted.count_down();
      }
      if (communicator.rank() == 2) {
        aborted.wait();
        await_broken(communicator);
      }
      if (communicator.rank() > 0) return communicator.close();
      error_of(ErrorKind::kAborted, [&] { probe(communicator); }, "the test has it");
    });
  }
}

TEST(Probe, Usage) {
  RankGroup group(GroupOptions(TransportKind::kInproc, 2));
  group.run([](Communicator& communicator) {
    expect_usage([&] { communicator.probe({{2}, {}}, {}); }, "rank 2");
    expect_usage([&] { communicator.probe({{communicator.rank()}, {}}, {}); }, "itself");
    const int other = 1 - communicator.rank();
    expect_usage([&] { communicator.probe({{other}, {communicator.rank()}}, {}); }, "is needed");
    EXPECT_FALSE(communicator.is_broken());
  });
  RankGroup alone(GroupOptions(TransportKind::kInproc, 1));
  alone.run(
      [](Communicator& communicator) { expect_usage([&] { communicator.probe({}, {}); }, "no other rank"); });
}

// Ranks on other hosts may be reached by neighbours alone: others cannot send.
TEST(Probe, OnlyNeighboursSend) {
  GroupOptions options(TransportKind::kClusterLine, 3);
  options.hosts = 3;
  RankGroup group(options);
  group.run([](Communicator& communicator) {
    if (communicator.rank() == 1) send(communicator, 0, {5}, 1);
    if (communicator.rank() == 0) {
      EXPECT_EQ(receive(communicator, probe(communicator)), Numbers{5});
    }
  });
}

}  // namespace
}  // namespace multiring
