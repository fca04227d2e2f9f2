// A stand-in for libnccl.so.2, over the stand-in for the driver: what ranks contribute passes through files,
// and is added in an order of its own. Functions do not block, an operation is done when its stream gets
// there, and a peer that has ended is waited for until an abort. Stricter than NCCL: every call has to be in
// a group, and ranks that ask for different things get an error that says so (communicator.h).
//
// The variable FAKE_NCCL, read at each call, has words divided by spaces: "version=N", "hang=init"
// (connecting never ends), "hang=operation", "hang=abort", "fail=id" (a unique id), "fail=init" (at once),
// "fail=enqueue" (of a call that is not the first of its group), "fail=group" (its end), "fail=operation" (an
// asynchronous error).

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fake_cuda/machine.h"
#include "fake_nccl/communicator.h"

#define FAKE_NCCL extern "C" __attribute__((visibility("default")))

extern "C" multiring::cuda::Result cuCtxPopCurrent_v2(multiring::cuda::Context* context);
extern "C" multiring::cuda::Result cuCtxPushCurrent_v2(multiring::cuda::Context context);

namespace multiring::testing::fake_nccl {
namespace {

constexpr int kSharedDevices = 23000;

struct Id {
  std::array<char, 128> bytes;
};

/// ncclConfig_t of 2.17.
struct Config {
  std::size_t size;
  unsigned magic;
  unsigned version;
  int blocking;
  int cluster_size;
  int min_blocks;
  int max_blocks;
  const char* network;
};
constexpr int kConfigVersion = 21700;
constexpr int kUndefined = -2147483647 - 1;

bool is_right(const Config& config) {
  const bool is_known =
      config.size == sizeof(Config) && config.magic == 0xcafebeef && config.version == kConfigVersion;
  return is_known && config.blocking == 0 && config.network == nullptr && config.cluster_size == kUndefined &&
         config.min_blocks == kUndefined && config.max_blocks == kUndefined;
}

using Handle = std::shared_ptr<Communicator>*;

FakeMachine& machine() { return FakeMachine::current(); }

int version() {
  const std::string name = "version=";
  const std::size_t found = options().find(name);
  return found == std::string::npos ? kSharedDevices : std::atoi(options().c_str() + found + name.size());
}

/// The device of the calling thread's context; negative: it has none.
int current_device() {
  cuda::Context context = nullptr;
  if (cuCtxPopCurrent_v2(&context) != cuda::kSuccess) return -1;
  cuCtxPushCurrent_v2(context);
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1;
}

bool lies_on(int device, const void* memory, std::size_t bytes) {
  const FakeMachine::Block* const block = machine().block_of(memory);
  return block != nullptr && block->device == device && block->kind == MemoryKind::kDevice &&
         (bytes == 0 || block == machine().block_of(static_cast<const std::byte*>(memory) + bytes - 1));
}

// Of the calling thread, as NCCL's: how many groups are open, and what begins when the last one ends.
thread_local int group_depth = 0;
thread_local std::shared_ptr<Communicator> group_comm;
thread_local std::vector<Call> group;
thread_local int group_error = kSuccess;

/// `reads`, `writes`: bytes at the input and the output, where the rank has them.
int ask(Handle handle, const Call& call, std::size_t reads, std::size_t writes) {
  const std::shared_ptr<Communicator>& comm = *handle;
  const int device = comm->device();
  if (!comm->is_connected() || current_device() != device || !comm->has_begun() || group_depth == 0)
    return kInvalidUsage;
  if (group_comm != nullptr && group_comm != comm) return kInvalidUsage;  // which none needs
  if (is_set("fail=enqueue") && !group.empty()) return group_error = kSystemError;
  const int other = call.peer >= 0 ? call.peer : std::max(call.header.root, 0);
  if (dtype_size(call.header.dtype) == 0 || call.header.op > 4 || other >= comm->size() ||
      call.header.count == 0)
    return kInvalidArgument;
  const std::lock_guard lock(machine().mutex());
  const FakeMachine::Stream* const found = machine().find_stream(call.stream, device);
  if (found == nullptr || found->device != device) return kInvalidArgument;
  if ((reads > 0 && !lies_on(device, call.input, reads)) ||
      (writes > 0 && !lies_on(device, call.output, writes)))
    return kInvalidArgument;
  group_comm = comm;
  group.push_back(call);
  return kSuccess;
}

std::size_t size_of(Handle comm) { return static_cast<std::size_t>((*comm)->size()); }

}  // namespace

bool shares_devices() {
  if (is_set("devices=apart")) return true;  // of one number, on other hosts
  const char* const set = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return version() >= kSharedDevices && set != nullptr && std::string(set) == "1";
}

}  // namespace multiring::testing::fake_nccl

using namespace multiring::testing::fake_nccl;  // NOLINT

FAKE_NCCL int ncclGetVersion(int* number) { return *number = version(), kSuccess; }

FAKE_NCCL const char* ncclGetErrorString(int) { return "as injected"; }

FAKE_NCCL const char* ncclGetLastError(Handle comm) {
  thread_local std::string text;
  text = (*comm)->last_error();
  return text.c_str();
}

FAKE_NCCL int ncclGetUniqueId(Id* id) {
  static std::atomic<int> made{0};
  const std::string path = (std::filesystem::temp_directory_path() / "fake_nccl.").string() +
                           std::to_string(::getpid()) + "." + std::to_string(made++);
  if (is_set("fail=id") || path.size() >= id->bytes.size()) return kSystemError;
  std::memcpy(id->bytes.data(), path.c_str(), path.size() + 1);
  return kSuccess;
}

FAKE_NCCL int ncclCommInitRankConfig(Handle* comm, int size, Id id, int rank, const Config* config) {
  if (!is_right(*config)) return kInvalidArgument;
  if (current_device() < 0 || is_set("fail=init")) return kInvalidUsage;
  *comm = new std::shared_ptr<Communicator>(
      std::make_shared<Communicator>(id.bytes.data(), size, rank, current_device()));
  return kInProgress;
}

FAKE_NCCL int ncclCommGetAsyncError(Handle comm, int* state) { return *state = (*comm)->state(), kSuccess; }

FAKE_NCCL int ncclGroupStart() { return ++group_depth, kSuccess; }

// A group with an error does nothing.
FAKE_NCCL int ncclGroupEnd() {
  if (group_depth == 0) return kInvalidUsage;
  if (--group_depth > 0) return kSuccess;
  std::vector<Call> ended = std::exchange(group, {});
  const std::shared_ptr<Communicator> comm = std::exchange(group_comm, nullptr);
  const int error = std::exchange(group_error, kSuccess);
  if (error != kSuccess) return error;
  if (is_set("fail=group")) return kSystemError;
  if (comm == nullptr) return kSuccess;
  comm->ask(std::move(ended));
  return kInProgress;
}

FAKE_NCCL int ncclAllReduce(const void* input, void* output, std::size_t count, int dtype, int op,
                            Handle comm, std::uintptr_t stream) {
  const std::size_t bytes = count * dtype_size(dtype);
  const Header header{.function = Function::kAllreduce, .dtype = dtype, .op = op, .count = count};
  return ask(comm, {header, -1, input, output, stream}, bytes, bytes);
}

FAKE_NCCL int ncclReduceScatter(const void* input, void* output, std::size_t count, int dtype, int op,
                                Handle comm, std::uintptr_t stream) {
  const std::size_t bytes = count * dtype_size(dtype);
  const Header header{.function = Function::kReduceScatter, .dtype = dtype, .op = op, .count = count};
  return ask(comm, {header, -1, input, output, stream}, bytes * size_of(comm), bytes);
}

FAKE_NCCL int ncclReduce(const void* input, void* output, std::size_t count, int dtype, int op, int root,
                         Handle comm, std::uintptr_t stream) {
  const std::size_t bytes = count * dtype_size(dtype);
  const Header header{.function = Function::kReduce, .dtype = dtype, .op = op, .root = root, .count = count};
  return ask(comm, {header, -1, input, output, stream}, bytes, (*comm)->rank() == root ? bytes : 0);
}

FAKE_NCCL int ncclAllGather(const void* input, void* output, std::size_t count, int dtype, Handle comm,
                            std::uintptr_t stream) {
  const std::size_t bytes = count * dtype_size(dtype);
  const Header header{.function = Function::kAllgather, .dtype = dtype, .count = count};
  return ask(comm, {header, -1, input, output, stream}, bytes, bytes * size_of(comm));
}

FAKE_NCCL int ncclBroadcast(const void* input, void* output, std::size_t count, int dtype, int root,
                            Handle comm, std::uintptr_t stream) {
  const std::size_t bytes = count * dtype_size(dtype);
  const Header header{.function = Function::kBroadcast, .dtype = dtype, .root = root, .count = count};
  return ask(comm, {header, -1, input, output, stream}, (*comm)->rank() == root ? bytes : 0, bytes);
}

FAKE_NCCL int ncclSend(const void* input, std::size_t count, int dtype, int peer, Handle comm,
                       std::uintptr_t stream) {
  const Header header{.function = Function::kSend, .dtype = dtype, .count = count};
  return ask(comm, {header, peer, input, nullptr, stream}, count * dtype_size(dtype), 0);
}

FAKE_NCCL int ncclRecv(void* output, std::size_t count, int dtype, int peer, Handle comm,
                       std::uintptr_t stream) {
  const Header header{.function = Function::kReceive, .dtype = dtype, .count = count};
  return ask(comm, {header, peer, nullptr, output, stream}, 0, count * dtype_size(dtype));
}

FAKE_NCCL int ncclCommAbort(Handle comm) {
  (*comm)->abort();
  delete comm;
  return kSuccess;
}
