// MPI's functions as XLA calls them, run by communicators of multiring.

#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "errors.h"
#include "group.h"
#include "multiring.h"
#include "socket.h"

namespace multiring::jax_collectives {
namespace {

// A message of at most so many bytes is sent by the thread that asks for it: such a send waits only until the
// messages before it are read, which does not depend on this rank's receives.
constexpr std::size_t kSentAtOnce = 64 * 1024;

/// A message on its way, until MPI_Wait.
struct Request {
  Group* group;
  void* received;  ///< null: it is a send
  std::size_t bytes;
  int peer;
  int tag;
  std::future<int> sent;
};

/// The place of this process, as Python has told it, and the group that is about to be made.
struct State {
  std::mutex mutex;  // guards all below
  int rank = 0;
  int size = 1;
  Connect connect = nullptr;
  std::vector<int> members;  // of the program that is rehearsed; none: no program is
  int color = -1;
  Group* made = nullptr;  // by that program
  int alone = -1;         // first device of the group of this rank alone; -1: no program communicates in it
};

State& state() {
  static auto* const only = new State;  // never destroyed: XLA's threads may outlive the statics
  return *only;
}

struct Type {
  mr_dtype dtype;
  std::size_t bytes;
};

bool find_type(mr_mpi_handle type, Type* found) {
  switch (type) {
    case MR_MPI_BYTE:
    case MR_MPI_UINT8_T:
      *found = {MR_UINT8, 1};
      return true;
    case MR_MPI_INT8_T:
      *found = {MR_INT8, 1};
      return true;
    case MR_MPI_INT16_T:
      *found = {MR_INT16, 2};
      return true;
    case MR_MPI_UINT16_T:
      *found = {MR_UINT16, 2};
      return true;
    case MR_MPI_INT32_T:
      *found = {MR_INT32, 4};
      return true;
    case MR_MPI_UINT32_T:
      *found = {MR_UINT32, 4};
      return true;
    case MR_MPI_INT64_T:
      *found = {MR_INT64, 8};
      return true;
    case MR_MPI_UINT64_T:
      *found = {MR_UINT64, 8};
      return true;
    case MR_MPI_FLOAT:
      *found = {MR_FLOAT32, 4};
      return true;
    case MR_MPI_DOUBLE:
      *found = {MR_FLOAT64, 8};
      return true;
    case MR_MPI_C_COMPLEX:
      *found = {MR_COMPLEX64, 8};
      return true;
    case MR_MPI_C_DOUBLE_COMPLEX:
      *found = {MR_COMPLEX128, 16};
      return true;
    default:
      return false;
  }
}

bool find_op(mr_mpi_handle op, mr_reduce_op* found) {
  switch (op) {
    case MR_MPI_SUM:
      *found = MR_SUM;
      return true;
    case MR_MPI_PROD:
      *found = MR_PRODUCT;
      return true;
    case MR_MPI_MIN:
      *found = MR_MIN;
      return true;
    case MR_MPI_MAX:
      *found = MR_MAX;
      return true;
    default:
      return false;
  }
}

Group& group_of(mr_mpi_handle comm) { return *reinterpret_cast<Group*>(comm); }

/// Refuses what cannot be run. XLA passes sizes as `int`: more than 2^31 - 1 elements become negative or are
/// cut, which cannot be seen.
int check_count(int count) {
  if (count >= 0) return 0;
  return keep_error(
      "multiring: UsageError: a collective of JAX has more than 2147483647 elements (bytes, for "
      "ppermute and all_to_all); split the array");
}

int check_comm(mr_mpi_handle comm) {
  if (comm > MR_MPI_C_DOUBLE_COMPLEX) return 0;
  return keep_error("multiring: InternalError: a collective of JAX has no communicator");
}

/// An operation on rows of `count` elements.
struct Rows {
  Rows(mr_kind kind, const void* input, void* output, std::size_t rows, int count, const Type& type)
      : shape{rows, static_cast<std::uint64_t>(count)} {
    operation.kind = kind;
    operation.dtype = type.dtype;
    operation.input = input;
    operation.output = output;
    operation.dims = 2;
    operation.shape = shape;
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  std::uint64_t shape[2];
  mr_operation operation = MR_OPERATION_INIT;
};

/// No exception leaves a function that C calls.
template <class Body>
int guarded(const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return keep_error("multiring: InternalError: " + std::string(error.what()));
  }
}

/// Runs a collective, whose `rows` are the input's, and whose output has `factor` rows.
int run(mr_kind kind, const void* input, void* output, std::size_t rows, std::size_t factor, int count,
        mr_mpi_handle type, mr_mpi_handle op, mr_mpi_handle comm) {
  return guarded([&] {
    if (const int code = check_comm(comm); code != 0) return code;
    if (const int code = check_count(count); code != 0) return code;
    Type element;
    mr_reduce_op reduction = MR_SUM;
    if (!find_type(type, &element) || (op != 0 && !find_op(op, &reduction)))
      return keep_error(
          "multiring: UsageError: a collective of JAX has a dtype or a reduction that MPI has "
          "and multiring has not");
    Rows asked(kind, input, output, rows, count, element);
    asked.operation.op = reduction;
    asked.operation.output_bytes = factor * static_cast<std::size_t>(count) * element.bytes;
    return group_of(comm).run(asked.operation);
  });
}

int allreduce(const void* input, void* output, int count, mr_mpi_handle type, mr_mpi_handle op,
              mr_mpi_handle comm) {
  return run(MR_ALLREDUCE, input, output, 1, 1, count, type, op, comm);
}

int reduce_scatter(const void* input, void* output, const int* counts, mr_mpi_handle type, mr_mpi_handle op,
                   mr_mpi_handle comm) {
  if (const int code = check_comm(comm); code != 0) return code;
  const int size = group_of(comm).size();
  for (int rank = 1; rank < size; ++rank)
    if (counts[rank] != counts[0]) return keep_error("multiring: InternalError: shares of different sizes");
  return run(MR_REDUCE_SCATTER, input, output, static_cast<std::size_t>(size), 1, counts[0], type, op, comm);
}

int allgather(const void* input, int count, mr_mpi_handle type, void* output, mr_mpi_handle comm) {
  if (const int code = check_comm(comm); code != 0) return code;
  const auto size = static_cast<std::size_t>(group_of(comm).size());
  return run(MR_ALLGATHER, input, output, 1, size, count, type, 0, comm);
}

int begin_message(const void* sent, void* received, int count, mr_mpi_handle type, int peer, int tag,
                  mr_mpi_handle comm, mr_mpi_handle* made) {
  return guarded([&] {
    if (const int code = check_comm(comm); code != 0) return code;
    if (const int code = check_count(count); code != 0) return code;
    Type element;
    if (!find_type(type, &element)) return keep_error("multiring: InternalError: a message of unknown dtype");
    Group& group = group_of(comm);
    const std::size_t bytes = static_cast<std::size_t>(count) * element.bytes;
    auto request = std::make_unique<Request>(Request{&group, received, bytes, peer, tag, {}});
    if (received == nullptr) {
      const auto send = [&group, peer, tag, sent, bytes] { return group.send(peer, tag, sent, bytes); };
      if (bytes <= kSentAtOnce) {
        if (const int code = send(); code != 0) return code;
      } else {
        request->sent = std::async(std::launch::async, send);
      }
    }
    *made = reinterpret_cast<mr_mpi_handle>(request.release());
    return 0;
  });
}

int isend(const void* data, int count, mr_mpi_handle type, int peer, int tag, mr_mpi_handle comm,
          mr_mpi_handle* made) {
  return begin_message(data, nullptr, count, type, peer, tag, comm, made);
}

int irecv(void* data, int count, mr_mpi_handle type, int peer, int tag, mr_mpi_handle comm,
          mr_mpi_handle* made) {
  return begin_message(nullptr, data, count, type, peer, tag, comm, made);
}

int wait(mr_mpi_handle* handle) {
  return guarded([&] {
    if (*handle == 0) return 0;
    const std::unique_ptr<Request> request(reinterpret_cast<Request*>(*handle));
    *handle = 0;
    if (request->received != nullptr)
      return request->group->receive(request->peer, request->tag, request->received, request->bytes);
    return request->sent.valid() ? request->sent.get() : 0;
  });
}

int comm_rank(mr_mpi_handle comm, int* rank) {
  State& now = state();
  const std::lock_guard lock(now.mutex);
  *rank = comm == MR_MPI_COMM_WORLD ? now.rank : group_of(comm).rank();
  return 0;
}

int comm_size(mr_mpi_handle comm, int* size) {
  State& now = state();
  const std::lock_guard lock(now.mutex);
  *size = comm == MR_MPI_COMM_WORLD ? now.size : group_of(comm).size();
  return 0;
}

/// XLA tells the first device of a group and this rank's index in it, but not the group. So every group is
/// made by a program of our own (multiring/jax_collectives/rehearsal.py), of which the group is known.
int comm_split(mr_mpi_handle, int color, int key, mr_mpi_handle* made) {
  return guarded([&] {
    State& now = state();
    const std::lock_guard lock(now.mutex);
    const bool expected = !now.members.empty() && now.made == nullptr && color == now.color && key >= 0 &&
                          key < static_cast<int>(now.members.size()) &&
                          now.members[static_cast<std::size_t>(key)] == now.rank;
    Group* group = nullptr;  // never freed: XLA's handles have no end
    if (expected) {
      group = now.made = new Group(now.members, key, now.connect);
    } else if (now.members.empty() && color == now.alone && key == 0) {
      group = new Group({now.rank}, 0, now.connect);
      group->end_rehearsal();
      now.alone = -1;
    } else {
      group = new Group(
          "multiring: UsageError: JAX runs a collective among ranks that its program does not "
          "name. Report the program, with the version of JAX; "
          "JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo runs it without multiring");
    }
    *made = reinterpret_cast<mr_mpi_handle>(group);
    return 0;
  });
}

}  // namespace
}  // namespace multiring::jax_collectives

using multiring::jax_collectives::state;

#define EXPORT extern "C" __attribute__((visibility("default")))

/// Fills the table of libmultiring_mpi.so. `connect` is called in threads of XLA.
EXPORT void multiring_mpi_attach(mr_mpi_table* table, int rank, int size,
                                 multiring::jax_collectives::Connect connect) {
  namespace ours = multiring::jax_collectives;
  auto& now = state();
  const std::lock_guard lock(now.mutex);
  now.rank = rank;
  now.size = size;
  now.connect = connect;
  *table = {&ours::comm_rank, &ours::comm_size, &ours::comm_split, &ours::allreduce, &ours::reduce_scatter,
            &ours::allgather, &ours::isend,     &ours::irecv,      &ours::wait,      &ours::error_text};
}

/// A program has collectives of this rank alone, whose device has this number. The compiler removes a
/// rehearsal of them. No other group that has no communicator yet is unknown then, so the next one is this.
EXPORT void multiring_mpi_expect_alone(int device) {
  auto& now = state();
  const std::lock_guard lock(now.mutex);
  now.alone = device;
}

/// The next program that runs makes a communicator of these ranks, whose first device has the number `color`.
EXPORT void multiring_mpi_begin_rehearsal(const int* members, int count, int color) {
  auto& now = state();
  const std::lock_guard lock(now.mutex);
  now.members.assign(members, members + count);
  now.color = color;
  now.made = nullptr;
}

/// Ends the rehearsal; returns whether the program has made its communicator.
EXPORT int multiring_mpi_end_rehearsal() {
  auto& now = state();
  const std::lock_guard lock(now.mutex);
  now.members.clear();
  if (now.made == nullptr) return 0;
  now.made->end_rehearsal();
  now.made = nullptr;
  return 1;
}
