#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "support/errors.h"
#include "support/operations.h"

namespace multiring {
namespace {

using namespace testing;

constexpr std::size_t kChunkBytes = 64 * 1024;

Bytes message(int source, int destination, DType dtype, std::size_t count) {
  std::mt19937_64 random(static_cast<std::uint64_t>(source * 1000 + destination) * 1000 + count);
  Bytes bytes(count * dtype_size(dtype));
  for (std::size_t at = 0; at < bytes.size(); at += 8) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + at, &word, std::min<std::size_t>(8, bytes.size() - at));
  }
  return bytes;
}

void send(Communicator& communicator, int destination, DType dtype, const Bytes& bytes,
          std::int64_t tag = 0) {
  Operation operation = send_of(dtype, bytes.size() / dtype_size(dtype), bytes.data(), destination);
  communicator.send(operation, tag, {});
}

/// This rank's neighbours in a ring of all ranks, and what it sends the next one and gets from the last.
struct Ring {
  Ring(const Communicator& communicator, DType dtype, std::size_t count)
      : rank(communicator.rank()),
        next((rank + 1) % communicator.size()),
        previous((rank + communicator.size() - 1) % communicator.size()),
        sent(message(rank, next, dtype, count)),
        expected(message(previous, rank, dtype, count)) {}

  /// In turns that need no buffering: even ranks send first.
  void turn(const std::function<void()>& send, const std::function<void()>& receive) const {
    if (rank % 2 == 1) receive();
    send();
    if (rank % 2 == 0) receive();
  }

  int rank, next, previous;
  Bytes sent, expected;
};

/// What comes from `source`, into memory that the receive allocates.
Operation receive(Communicator& communicator, int source, std::int64_t tag = 0) {
  Operation operation = make_operation({.kind = OpKind::kReceive, .dtype = DType::kUInt8, .root = source});
  communicator.receive(operation, tag, {});
  return operation;
}

void receive_into(Communicator& communicator, int source, DType dtype, Bytes& bytes, std::int64_t tag = 0) {
  Request request{.kind = OpKind::kReceive, .dtype = dtype, .rows = bytes.size() / dtype_size(dtype)};
  request.output = bytes.data();
  request.output_bytes = bytes.size();
  request.root = source;
  Operation operation = make_operation(request);
  communicator.receive(operation, tag, {});
}

class PointToPointTest : public GroupTest {};

TEST_P(PointToPointTest, EveryDtypeAndLengthAroundTheRing) {
  const std::size_t byte_counts[] = {0, 8, 1000, kChunkBytes, kChunkBytes + 8, 5 * kChunkBytes + 8};
  group_.run([&](Communicator& communicator) {
    for (const DType dtype : kAllDTypes) {
      for (const std::size_t bytes : byte_counts) {
        if (bytes > kChunkBytes + 8 && dtype_size(dtype) != 4)
          continue;  // what is new there is not the dtype's
        const std::size_t count = bytes / dtype_size(dtype);
        const Ring ring(communicator, dtype, count);
        Operation received;
        ring.turn([&] { send(communicator, ring.next, dtype, ring.sent, 5); },
                  [&] { received = receive(communicator, ring.previous, 5); });
        EXPECT_EQ(result_of(received), ring.expected);
        EXPECT_EQ(received.descriptor.dtype, dtype);
        EXPECT_EQ(received.descriptor.shape[0], count);
        Bytes into(ring.expected.size(), 0xcd);
        ring.turn([&] { send(communicator, ring.next, dtype, ring.sent); },
                  [&] { receive_into(communicator, ring.previous, dtype, into); });
        EXPECT_EQ(into, ring.expected);
      }
    }
  });
}

// Messages of a pair overtake nobody, and those of different pairs do not wait for each other.
TEST_P(PointToPointTest, ManyBetweenAllPairsStayInOrder) {
  constexpr int kMessages = 60;
  group_.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const std::jthread sender([&] {
      for (int i = 0; i < kMessages; ++i)
        for (int peer = 0; peer < communicator.size(); ++peer)
          if (peer != rank)
            send(communicator, peer, DType::kInt16, message(rank, peer, DType::kInt16, i * 31), i);
    });
    for (int i = 0; i < kMessages; ++i) {
      for (int peer = communicator.size() - 1; peer >= 0; --peer) {
        if (peer == rank) continue;
        EXPECT_EQ(result_of(receive(communicator, peer, i)), message(peer, rank, DType::kInt16, i * 31));
      }
    }
  });
}

// At most two chunks are buffered: such a send is done before anybody receives.
TEST_P(PointToPointTest, ShortMessagesAreBuffered) {
  group_.run([&](Communicator& communicator) {
    const int peer = communicator.rank() ^ 1;
    const bool has_peer = peer < communicator.size();
    const Bytes bytes(2 * kChunkBytes, static_cast<std::uint8_t>(communicator.rank()));
    if (has_peer) send(communicator, peer, DType::kUInt8, bytes);
    run_barrier(communicator);
    if (!has_peer) return;
    const Bytes expected(bytes.size(), static_cast<std::uint8_t>(peer));
    EXPECT_EQ(result_of(receive(communicator, peer)), expected);
  });
}

// Messages do not touch the rounds: collectives, synchronous and not, go on in other threads.
TEST_P(PointToPointTest, BesideCollectives) {
  constexpr int kRepeats = 30;
  group_.run([&](Communicator& communicator) {
    const std::jthread messages([&] {
      for (int i = 0; i < kRepeats; ++i) {
        const Ring ring(communicator, DType::kFloat32, 30000);
        Operation received;
        ring.turn([&] { send(communicator, ring.next, DType::kFloat32, ring.sent); },
                  [&] { received = receive(communicator, ring.previous); });
        EXPECT_EQ(result_of(received), ring.expected);
      }
    });
    for (int i = 0; i < kRepeats; ++i) {
      Array ones(5000, 1);
      perform(communicator, sum_in_place(ones), kCallModes[i % 2]);
      EXPECT_EQ(ones, Array(5000, communicator.size()));
    }
  });
}

// A thread that waits behind another one for the same peer has its own deadline.
TEST_P(PointToPointTest, DeadlineBehindAnotherThread) {
  group_.outcomes([&](Communicator& communicator) {
    if (communicator.rank() != 0) return;
    const std::jthread patient([&] { EXPECT_THROW(receive(communicator, 1), Error); });
    std::byte byte{};
    Operation operation = make_operation({.kind = OpKind::kReceive, .rows = 1, .output = &byte, .root = 1});
    const Error error =
        error_of(ErrorKind::kTimeout, [&] { communicator.receive(operation, 0, {0.05, nullptr}); });
    EXPECT_LT(error.context().elapsed, communicator.options().timeout) << "the other thread's";
  });
}

INSTANTIATE_TEST_SUITE_P(Groups, PointToPointTest,
                         ::testing::ValuesIn(group_cases({2, 3, 4, 7}, {kSmallStaging})), kPrinted);

TEST(PointToPointUsage, PeersOutOfRangeAndOneself) {
  RankGroup group(GroupOptions(TransportKind::kInproc, 2));
  group.run([](Communicator& communicator) {
    const Bytes bytes(4);
    for (const int peer : {-1, 2, 100}) {
      expect_usage([&] { send(communicator, peer, DType::kFloat32, bytes); }, "rank " + std::to_string(peer));
      expect_usage([&] { receive(communicator, peer); }, "");
    }
    expect_usage([&] { send(communicator, communicator.rank(), DType::kFloat32, bytes); }, "");
    expect_usage([&] { receive(communicator, communicator.rank()); }, "");
    EXPECT_FALSE(communicator.is_broken());
    run_barrier(communicator);
  });
}

}  // namespace
}  // namespace multiring
