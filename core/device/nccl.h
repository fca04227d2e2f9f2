#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/arithmetic/dtype.h"
#include "base/arithmetic/reduction.h"
#include "base/export.h"
#include "base/immovable.h"
#include "device/devices.h"
#include "device/shared_library.h"

namespace multiring::nccl {

// The part of NCCL's C ABI that is needed here, declared anew, as that of the driver is.
using Result = int;
using Comm = struct ncclComm*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kInProgress = 7;
/// The oldest version whose ncclConfig_t has all of `Config`.
inline constexpr int kMinVersion = 21700;
/// From this one on NCCL_MULTI_RANK_GPU_ENABLE=1 allows several ranks on one device.
inline constexpr int kSharedDevices = 23000;

struct UniqueId {
  std::array<char, 128> bytes{};
};
static_assert(sizeof(UniqueId) == 128, "as ncclUniqueId");

/// ncclConfig_t of NCCL 2.17. `version` is that of this layout, whatever library is found: it tells the
/// library how much there is to read.
struct Config {
  static constexpr int kUndefined = -2147483647 - 1;

  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kMinVersion;
  int blocking = 0;
  int cluster_size = kUndefined;
  int min_blocks = kUndefined;
  int max_blocks = kUndefined;
  const char* network = nullptr;
};
static_assert(sizeof(Config) == 40, "as ncclConfig_t of 2.17");

/// The functions that are used, by the names of their entries in the library.
struct MULTIRING_API Library {
  Result (*get_version)(int* version);
  const char* (*error_string)(Result result);
  const char* (*last_error)(Comm comm);
  Result (*unique_id)(UniqueId* id);
  Result (*init_rank)(Comm* comm, int size, UniqueId id, int rank, Config* config);
  Result (*async_error)(Comm comm, Result* result);
  Result (*abort)(Comm comm);
  Result (*group_start)();
  Result (*group_end)();
  Result (*allreduce)(const void* input, void* output, std::size_t count, int dtype, int op, Comm comm,
                      cuda::Stream stream);
  Result (*reduce_scatter)(const void* input, void* output, std::size_t count, int dtype, int op, Comm comm,
                           cuda::Stream stream);
  Result (*reduce)(const void* input, void* output, std::size_t count, int dtype, int op, int root, Comm comm,
                   cuda::Stream stream);
  Result (*allgather)(const void* input, void* output, std::size_t count, int dtype, Comm comm,
                      cuda::Stream stream);
  Result (*broadcast)(const void* input, void* output, std::size_t count, int dtype, int root, Comm comm,
                      cuda::Stream stream);
  Result (*send)(const void* input, std::size_t count, int dtype, int peer, Comm comm, cuda::Stream stream);
  Result (*receive)(void* output, std::size_t count, int dtype, int peer, Comm comm, cuda::Stream stream);
  int version;

  /// That of this process, opened at the first call: one that the process has loaded, that of a wheel, or the
  /// system's; null, with the reason in `why`, if there is none that can be used.
  static const Library* find(std::string* why);
  /// Fills the table. Why the library cannot be used; empty: it can.
  std::string load(const SharedLibrary& library);
};

/// "2.27.3" of 22703; from 2.9 on there are two digits for the second number.
MULTIRING_API std::string version_text(int version);

/// NCCL's number of a dtype; empty: it has none.
MULTIRING_API std::optional<int> dtype_code(DType dtype);
/// Of what a reduction of such elements does; empty: NCCL has none that gives the same but for the order of
/// additions and its rounding.
MULTIRING_API std::optional<int> op_code(const Reduction& reduction, DType dtype);

/// What moves is bytes, whatever the elements are (ncclUint8).
inline constexpr int kBytes = 1;

enum class Function { kAllreduce, kReduceScatter, kReduce, kAllgather, kBroadcast, kSend, kReceive };

/// A call of one of NCCL's functions, on contiguous elements.
struct Call {
  Function function;
  const void* input;
  void* output;       ///< may be the input
  std::size_t count;  ///< elements; of a reduce-scatter in the output, of an allgather in the input
  int peer = -1;      ///< or the root
};

/// How long an abort is waited for.
inline constexpr double kAbortSeconds = 5;

/// A rank's part of one of NCCL's communicators, on one device and a stream of its own, whose calls do not
/// block. It is aborted at its end, for that waits for no peer; no operation is under way then on any rank.
/// Calls come one at a time.
class MULTIRING_API Communicator : Immovable {
 public:
  Communicator(const Library& library, std::shared_ptr<Devices> devices, int device);
  ~Communicator();

  /// Begins to connect with the other ranks; `is_ready` says when that is done. Raises a DeviceError.
  void connect(int size, int rank, const UniqueId& id);
  /// Whether what was begun is done. Raises a DeviceError if it, or an operation under way, has failed.
  bool is_ready();
  /// Begins the calls as a group, as work of the stream; `op` counts where they add.
  void begin(std::span<const Call> calls, int dtype, int op);
  /// Ends what is under way, on this rank alone, and waits for the stream. False: that takes longer, and what
  /// NCCL and the stream have is left to them. No other call may follow.
  bool abort(double seconds);

  int size() const { return size_; }
  int rank() const { return rank_; }
  int device() const { return device_; }
  cuda::Stream stream() const { return stream_; }
  Devices& devices() const { return *devices_; }

 private:
  Result ask(const Call& call, int dtype, int op);
  void check(Result result, const char* function) const;

  const Library& library_;
  const std::shared_ptr<Devices> devices_;
  const int device_;
  const int process_;
  int size_ = 0;
  int rank_ = 0;
  cuda::Stream stream_ = nullptr;
  Comm comm_ = nullptr;
  bool is_abandoned_ = false;  // by an abort that has not ended in time
};

}  // namespace multiring::nccl
