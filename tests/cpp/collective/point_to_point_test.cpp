#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "support/operations.h"
#include "support/oracles/reduce_oracle.h"
#include "support/rank_group.h"

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
  Request request{.kind = OpKind::kSend, .dtype = dtype, .rows = bytes.size() / dtype_size(dtype)};
  request.input = bytes.data();
  request.root = destination;
  Operation operation = make_operation(request);
  communicator.send(operation, tag, {});
}

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

// Around the ring, in turns that need no buffering: even ranks send first.
TEST_P(PointToPointTest, EveryDtypeAndLengthAroundTheRing) {
  const std::size_t byte_counts[] = {0, 8, 1000, kChunkBytes, kChunkBytes + 8, 5 * kChunkBytes + 8};
  group_.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const int size = communicator.size();
    const int next = (rank + 1) % size;
    const int previous = (rank + size - 1) % size;
    for (const DType dtype : kAllDTypes) {
      for (const std::size_t bytes : byte_counts) {
        if (bytes > kChunkBytes + 8 && dtype_size(dtype) != 4)
          continue;  // what is new there is not the dtype's
        const std::size_t count = bytes / dtype_size(dtype);
        const Bytes mine = message(rank, next, dtype, count);
        const Bytes expected = message(previous, rank, dtype, count);
        Operation received;
        const auto get = [&] { received = receive(communicator, previous, 5); };
        if (rank % 2 == 1) get();
        send(communicator, next, dtype, mine, 5);
        if (rank % 2 == 0) get();
        EXPECT_EQ(result_of(received), expected);
        EXPECT_EQ(received.descriptor.dtype, dtype);
        EXPECT_EQ(received.descriptor.shape[0], count);
        Bytes into(expected.size(), 0xcd);
        if (rank % 2 == 1) receive_into(communicator, previous, dtype, into);
        send(communicator, next, dtype, mine);
        if (rank % 2 == 0) receive_into(communicator, previous, dtype, into);
        EXPECT_EQ(into, expected);
      }
    }
  });
}

// Messages of a pair overtake nobody, and those of different pairs do not wait for each other.
TEST_P(PointToPointTest, ManyBetweenAllPairsStayInOrder) {
  constexpr int kMessages = 60;
  group_.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    std::thread sender([&] {
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
    sender.join();
  });
}

// At most two chunks are buffered: such a send is done before anybody receives.
TEST_P(PointToPointTest, ShortMessagesAreBuffered) {
  group_.run([&](Communicator& communicator) {
    Operation barrier = barrier_operation();
    const int peer = communicator.rank() ^ 1;
    const bool has_peer = peer < communicator.size();
    const Bytes bytes(2 * kChunkBytes, static_cast<std::uint8_t>(communicator.rank()));
    if (has_peer) send(communicator, peer, DType::kUInt8, bytes);
    communicator.run(barrier, {});
    if (!has_peer) return;
    const Bytes expected(bytes.size(), static_cast<std::uint8_t>(peer));
    EXPECT_EQ(result_of(receive(communicator, peer)), expected);
  });
}

// Messages do not touch the rounds: collectives, synchronous and not, go on in other threads.
TEST_P(PointToPointTest, BesideCollectives) {
  constexpr int kRepeats = 30;
  group_.run([&](Communicator& communicator) {
    const int rank = communicator.rank();
    const int size = communicator.size();
    std::thread ring([&] {
      for (int i = 0; i < kRepeats; ++i) {
        const int next = (rank + 1) % size;
        const int previous = (rank + size - 1) % size;
        const Bytes mine = message(rank, next, DType::kFloat32, 30000);
        Operation received;
        if (rank % 2 == 1) received = receive(communicator, previous);
        send(communicator, next, DType::kFloat32, mine);
        if (rank % 2 == 0) received = receive(communicator, previous);
        EXPECT_EQ(result_of(received), message(previous, rank, DType::kFloat32, 30000));
      }
    });
    for (int i = 0; i < kRepeats; ++i) {
      std::vector<std::int64_t> ones(5000, 1);
      Operation operation = sum_in_place(ones);
      perform(communicator, operation, kCallModes[i % 2]);
      EXPECT_EQ(ones, std::vector<std::int64_t>(5000, size));
    }
    ring.join();
  });
}

// A thread that waits behind another one for the same peer has its own deadline.
TEST_P(PointToPointTest, DeadlineBehindAnotherThread) {
  group_.outcomes([&](Communicator& communicator) {
    if (communicator.rank() != 0) return;
    std::thread patient([&] { EXPECT_THROW(receive(communicator, 1), Error); });
    std::byte byte{};
    Operation operation = make_operation({.kind = OpKind::kReceive, .rows = 1, .output = &byte, .root = 1});
    CallOptions options;
    options.timeout = 0.05;
    try {
      communicator.receive(operation, 0, options);
      ADD_FAILURE() << "received what nobody sent";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kTimeout) << error.what();
      EXPECT_LT(error.context().elapsed, communicator.options().timeout) << "the other thread's";
    }
    patient.join();
  });
}

INSTANTIATE_TEST_SUITE_P(Groups, PointToPointTest,
                         ::testing::ValuesIn(group_cases({2, 3, 4, 7}, {kSmallStaging})),
                         [](const auto& info) { return case_name(info.param); });

/// The error of `body`; a usage error leaves the communicator as it was.
template <class Body>
Error usage_error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    return error;
  }
  ADD_FAILURE() << "no error";
  return Error(ErrorKind::kInternal, "");
}

TEST(PointToPointUsage, PeersOutOfRangeAndOneself) {
  RankGroup group(GroupOptions(TransportKind::kInproc, 2));
  group.run([](Communicator& communicator) {
    const Bytes bytes(4);
    for (const int peer : {-1, 2, 100}) {
      const Error error = usage_error_of([&] { send(communicator, peer, DType::kFloat32, bytes); });
      EXPECT_NE(std::string(error.what()).find("rank " + std::to_string(peer)), std::string::npos)
          << error.what();
      usage_error_of([&] { receive(communicator, peer); });
    }
    usage_error_of([&] { send(communicator, communicator.rank(), DType::kFloat32, bytes); });
    usage_error_of([&] { receive(communicator, communicator.rank()); });
    EXPECT_FALSE(communicator.is_broken());
    run(communicator, barrier_operation());
  });
}

}  // namespace
}  // namespace multiring
