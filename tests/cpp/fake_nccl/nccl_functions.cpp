// A stand-in for libnccl.so.2, over the stand-in for the driver: what ranks contribute passes through files,
// and is added in an order of its own. Functions do not block, an operation is done when its stream gets
// there, and a peer that has ended is waited for until an abort.
//
// The variable FAKE_NCCL, read at each call, has words divided by spaces: "version=N", "hang=init"
// (connecting never ends), "hang=allreduce", "hang=abort", "fail=id" (a unique id), "fail=init" (at once),
// "fail=enqueue" (of a part that is not the first), "fail=group" (its end), "fail=allreduce" (an asynchronous
// error).

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_cuda/machine.h"

#define FAKE_NCCL extern "C" __attribute__((visibility("default")))

extern "C" multiring::cuda::Result cuCtxPopCurrent_v2(multiring::cuda::Context* context);
extern "C" multiring::cuda::Result cuCtxPushCurrent_v2(multiring::cuda::Context context);

namespace multiring::testing {
namespace {

enum Result : int {
  kSuccess = 0,
  kSystemError = 2,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};
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

struct Comm {
  std::string path;  // all files of the communicator begin so
  int size;
  int rank;
  int device;
  bool hangs = false;
  bool is_connected = false;
  int operations = 0;
  // What has been asked for and has not begun; begins when the state has been asked for some times.
  std::vector<std::function<void()>> asked;
  int queries_until_begun = 0;
  std::atomic<int> error{kSuccess};
  std::atomic<bool> is_aborted{false};

  std::string file(const std::string& of, int of_rank) const {
    return path + "." + of + "." + std::to_string(of_rank);
  }
  /// Another rank sees the file when it is whole.
  void publish(const std::string& of, const char* data, std::size_t bytes) const {
    const std::string made = file(of, rank);
    std::ofstream(made + ".part", std::ios::binary).write(data, static_cast<std::streamsize>(bytes));
    std::filesystem::rename(made + ".part", made);
  }
  bool all_published(const std::string& of) const {
    for (int each = 0; each < size; ++each)
      if (!std::filesystem::exists(file(of, each))) return false;
    return true;
  }
  std::vector<char> read(const std::string& of, int of_rank) const {
    std::ifstream from(file(of, of_rank), std::ios::binary);
    return {std::istreambuf_iterator<char>(from), {}};
  }
  void remove_own(const std::string& of) const { std::filesystem::remove(file(of, rank)); }
};
using Handle = std::shared_ptr<Comm>*;

FakeMachine& machine() { return FakeMachine::current(); }

std::string options() {
  const char* const set = std::getenv("FAKE_NCCL");
  return set != nullptr ? set : "";
}

bool is_set(const std::string& word) {
  std::istringstream words(options());
  for (std::string each; words >> each;)
    if (each == word) return true;
  return false;
}

int version() {
  const std::string name = "version=";
  const std::size_t found = options().find(name);
  return found == std::string::npos ? kSharedDevices : std::atoi(options().c_str() + found + name.size());
}

bool shares_devices() {
  const char* const set = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return version() >= kSharedDevices && set != nullptr && std::string(set) == "1";
}

/// The device of the calling thread's context; negative: it has none.
int current_device() {
  cuda::Context context = nullptr;
  if (cuCtxPopCurrent_v2(&context) != cuda::kSuccess) return -1;
  cuCtxPushCurrent_v2(context);
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1;
}

/// What is added of it is float, and rounded once for each operator.
struct BFloat16 {
  std::uint16_t bits;

  explicit BFloat16(float value) : bits(from(std::bit_cast<std::uint32_t>(value))) {}
  explicit BFloat16(int value) : BFloat16(static_cast<float>(value)) {}
  operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U); }  // NOLINT

 private:
  static std::uint16_t from(std::uint32_t value) {
    return static_cast<std::uint16_t>((value + 0x7fffU + (value >> 16U & 1U)) >> 16U);
  }
};

template <class T>
T combined(T a, T b, int op) {
  if (op == 1) return static_cast<T>(a * b);
  if (op == 2) return a > b ? a : b;
  if (op == 3) return a < b ? a : b;
  return static_cast<T>(a + b);
}

/// From the last rank to the first.
template <class T>
void reduce_files(const Comm& comm, const std::string& of, int op, std::byte* to, std::size_t count) {
  std::vector<char> sum = comm.read(of, comm.size - 1);
  auto* const sums = reinterpret_cast<T*>(sum.data());
  for (int rank = comm.size - 2; rank >= 0; --rank) {
    const std::vector<char> next = comm.read(of, rank);
    for (std::size_t i = 0; i < count; ++i)
      sums[i] = combined(sums[i], reinterpret_cast<const T*>(next.data())[i], op);
  }
  if (op == 4)
    for (std::size_t i = 0; i < count; ++i) sums[i] = static_cast<T>(sums[i] / static_cast<T>(comm.size));
  std::memcpy(to, sum.data(), count * sizeof(T));
}

using Reduce = void (*)(const Comm&, const std::string&, int, std::byte*, std::size_t);
struct Type {
  Reduce reduce;
  std::size_t size;
};
template <class T>
constexpr Type type_of() {
  return {reduce_files<T>, sizeof(T)};
}
// In the order of ncclDataType_t.
constexpr Type kTypes[] = {type_of<std::int8_t>(),   type_of<std::uint8_t>(), type_of<std::int32_t>(),
                           type_of<std::uint32_t>(), type_of<std::int64_t>(), type_of<std::uint64_t>(),
                           type_of<_Float16>(),      type_of<float>(),        type_of<double>(),
                           type_of<BFloat16>()};

bool lies_on(int device, const void* memory, std::size_t bytes) {
  const FakeMachine::Block* const block = machine().block_of(memory);
  return block != nullptr && block->device == device && block->kind == MemoryKind::kDevice &&
         (bytes == 0 || block == machine().block_of(static_cast<const std::byte*>(memory) + bytes - 1));
}

void begin_allreduce(const std::shared_ptr<Comm>& comm, const void* input, void* output, std::size_t count,
                     int dtype, int op, std::uintptr_t stream) {
  const Type type = kTypes[dtype];
  const std::string of = std::to_string(comm->operations++);
  const bool hangs = is_set("hang=allreduce");
  if (is_set("fail=allreduce")) comm->error = kRemoteError;
  const auto publish = [=] {
    if (!comm->is_aborted)
      comm->publish(of, reinterpret_cast<const char*>(machine().view(input)), count * type.size);
  };
  const auto add = [=] {
    if (!comm->is_aborted) type.reduce(*comm, of, op, machine().view(output), count);
  };
  const auto can_add = [=] {
    const bool can = !hangs && comm->error == kSuccess;
    return comm->is_aborted || (can && comm->all_published(of));
  };
  const std::lock_guard lock(machine().mutex());
  FakeMachine::Stream& found = *machine().find_stream(stream, comm->device);
  machine().enqueue(found, {.work = publish});
  machine().enqueue(found, {.work = add, .is_possible = can_add});
}

// Of the calling thread, as NCCL's: how many groups are open, and what begins when the last one ends.
thread_local int group_depth = 0;
struct Asked {
  std::shared_ptr<Comm> comm;
  std::function<void()> begin;
};
thread_local std::vector<Asked> group;
thread_local int group_error = kSuccess;

}  // namespace
}  // namespace multiring::testing

using namespace multiring;           // NOLINT
using namespace multiring::testing;  // NOLINT

FAKE_NCCL int ncclGetVersion(int* number) { return *number = version(), kSuccess; }

FAKE_NCCL const char* ncclGetErrorString(int) { return "as injected"; }

FAKE_NCCL const char* ncclGetLastError(Handle) { return "the last error"; }

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
  auto made = std::make_shared<Comm>();
  made->path = id.bytes.data();
  made->size = size;
  made->rank = rank;
  made->device = current_device();
  made->hangs = is_set("hang=init");
  if (!made->hangs) made->publish("init", std::to_string(made->device).c_str(), 1);
  *comm = new std::shared_ptr<Comm>(std::move(made));
  return kInProgress;
}

FAKE_NCCL int ncclCommGetAsyncError(Handle handle, int* state) {
  Comm& comm = **handle;
  *state = comm.error;
  if (*state != kSuccess) return kSuccess;
  if (!comm.asked.empty()) {
    *state = kInProgress;
    if (--comm.queries_until_begun > 0) return kSuccess;
    for (const auto& begin : std::exchange(comm.asked, {})) begin();
    return kSuccess;
  }
  if (comm.is_connected) return kSuccess;
  *state = kInProgress;
  if (comm.hangs || !comm.all_published("init")) return kSuccess;
  std::set<std::vector<char>> devices;
  for (int rank = 0; rank < comm.size; ++rank) devices.insert(comm.read("init", rank));
  const bool may = shares_devices() || static_cast<int>(devices.size()) == comm.size;
  comm.is_connected = may;
  *state = may ? kSuccess : kInvalidUsage;
  return kSuccess;
}

FAKE_NCCL int ncclGroupStart() { return ++group_depth, kSuccess; }

// A group with an error does nothing.
FAKE_NCCL int ncclGroupEnd() {
  if (group_depth == 0) return kInvalidUsage;
  if (--group_depth > 0) return kSuccess;
  const std::vector<Asked> ended = std::exchange(group, {});
  const int error = std::exchange(group_error, kSuccess);
  if (error != kSuccess) return error;
  if (is_set("fail=group")) return kSystemError;
  for (const Asked& each : ended) {
    each.comm->asked.push_back(each.begin);
    each.comm->queries_until_begun = 3;
  }
  return kInProgress;
}

FAKE_NCCL int ncclAllReduce(const void* input, void* output, std::size_t count, int dtype, int op,
                            Handle handle, std::uintptr_t stream) {
  const std::shared_ptr<Comm> comm = *handle;
  if (!comm->is_connected || current_device() != comm->device || !comm->asked.empty() || group_depth == 0)
    return kInvalidUsage;
  if (is_set("fail=enqueue") && !group.empty()) return group_error = kSystemError;
  if (dtype < 0 || dtype >= static_cast<int>(std::size(kTypes)) || op < 0 || op > 4) return kInvalidArgument;
  const std::size_t bytes = count * kTypes[dtype].size;
  {
    const std::lock_guard lock(machine().mutex());
    const FakeMachine::Stream* const found = machine().find_stream(stream, comm->device);
    if (found == nullptr || found->device != comm->device) return kInvalidArgument;
    if (!lies_on(comm->device, input, bytes) || !lies_on(comm->device, output, bytes))
      return kInvalidArgument;
  }
  group.push_back({comm, [=] { begin_allreduce(comm, input, output, count, dtype, op, stream); }});
  return kSuccess;
}

FAKE_NCCL int ncclCommAbort(Handle handle) {
  Comm& comm = **handle;
  while (is_set("hang=abort")) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  comm.is_aborted = true;
  comm.remove_own("init");
  for (int operation = 0; operation < comm.operations; ++operation)
    comm.remove_own(std::to_string(operation));
  delete handle;
  return kSuccess;
}
