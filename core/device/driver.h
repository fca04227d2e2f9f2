#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"
#include "base/export.h"
#include "device/shared_library.h"

namespace multiring {

/// What goes wrong with a device, before it is known in which operation.
class MULTIRING_API DeviceError : public Error {
 public:
  using Error::Error;
};

}  // namespace multiring

namespace multiring::cuda {

// The part of the CUDA driver's C ABI that is needed here, declared anew: no header of CUDA is there when the
// library is built. HIP has the same under other names, with the same numbers (from ROCm 6 on).
using Result = int;
using Device = int;
using Pointer = std::uintptr_t;  // CUdeviceptr
using Context = struct CUctx_st*;
using Stream = struct CUstream_st*;
using Event = struct CUevent_st*;
using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;
/// What another process needs to have the same memory (CUipcMemHandle).
struct IpcHandle {
  std::array<char, 64> bytes{};
};

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotReady = 600;
inline constexpr Result kIllegalAddress = 700;

/// Whether a call was refused because a stream is being captured (cudaErrorStreamCapture...).
constexpr bool is_of_capture(Result result) { return result >= 900 && result <= 907; }

/// CU_STREAM_CAPTURE_MODE_RELAXED: a capture elsewhere in the process forbids this thread nothing.
inline constexpr int kCaptureRelaxed = 2;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostAllocPortable = 1;

enum PointerAttribute : int { kMemoryType = 2, kIsManaged = 8, kDeviceOrdinal = 9 };
enum DeviceAttribute : int { kMultiprocessors = 16, kCapabilityMajor = 75, kCapabilityMinor = 76 };
/// CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: kernels of the current device reach the memory, where devices can.
inline constexpr unsigned kIpcEnableAccess = 1;
enum MemoryType : unsigned { kHostMemory = 1, kDeviceMemory = 2 };

/// "cuEventRecord on device 0", for `Driver::check`.
inline std::string on(const char* function, int device) {
  return std::string(function) + " on device " + std::to_string(device);
}

/// The functions that are used, by the names of their entries in the library: CUDA's or HIP's.
struct MULTIRING_API Driver {
  bool is_hip;
  Result (*init)(unsigned flags);
  Result (*driver_version)(int* version);
  Result (*error_name)(Result error, const char** name);
  Result (*error_string)(Result error, const char** text);
  Result (*device_count)(int* count);
  Result (*device_get)(Device* device, int ordinal);
  Result (*device_uuid)(char* uuid, Device device);  // of 16 bytes; HIP's need not differ
  Result (*device_pci_id)(char* text, int room, Device device);
  Result (*primary_context_retain)(Context* context, Device device);
  Result (*context_push)(Context context);
  Result (*context_pop)(Context* context);
  // HIP's in the place of these three: its contexts do not give back the device that was current.
  Result (*get_device)(int* ordinal);
  Result (*set_device)(int ordinal);
  Result (*last_error)();  // of HIP: see `forget`
  Result (*exchange_capture_mode)(int* mode);
  Result (*pointer_attributes)(unsigned count, PointerAttribute* attributes, void** values, Pointer pointer);
  Result (*stream_create)(Stream* stream, unsigned flags);
  Result (*stream_wait_event)(Stream stream, Event event, unsigned flags);
  Result (*stream_is_capturing)(Stream stream, int* status);
  Result (*event_create)(Event* event, unsigned flags);
  Result (*event_record)(Event event, Stream stream);
  Result (*event_query)(Event event);
  Result (*event_synchronize)(Event event);
  Result (*host_alloc)(void** memory, std::size_t bytes, unsigned flags);
  Result (*host_free)(void* memory);
  Result (*memory_alloc)(Pointer* memory, std::size_t bytes);
  Result (*memory_free)(Pointer memory);
  Result (*copy_to_host)(void* to, Pointer from, std::size_t bytes, Stream stream);
  Result (*copy_to_device)(Pointer to, const void* from, std::size_t bytes, Stream stream);
  Result (*copy_on_device)(Pointer to, Pointer from, std::size_t bytes, Stream stream);

  Result (*can_access_peer)(int* can, Device device, Device peer);  // null: it cannot be asked

  // What peer memory needs besides; without these the others serve all the same. HIP's are not taken: there
  // is no kernel for it.
  Result (*device_attribute)(int* value, DeviceAttribute attribute, Device device);
  Result (*module_load)(Module* module, const void* image);
  Result (*module_function)(Function* function, Module module, const char* name);
  Result (*launch_kernel)(Function function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
                          unsigned, unsigned shared_bytes, Stream stream, void** arguments, void** extra);
  Result (*ipc_export)(IpcHandle* handle, Pointer memory);
  Result (*ipc_import)(Pointer* memory, IpcHandle handle, unsigned flags);
  Result (*ipc_close)(Pointer memory);
  std::string missing_for_peers;  ///< the first of these that the library lacks; empty: none

  /// The driver of this machine, loaded and initialised at the first call; null, with the reason in `why`, if
  /// there is none that can be used. The one that the process has loaded comes first, then CUDA's.
  static const Driver* find(std::string* why);
  /// The stream of a number, of which 1 is the one that orders with all blocking streams of a device: older
  /// HIP knows that by 0 alone.
  Stream stream_of(std::uintptr_t number) const {
    return reinterpret_cast<Stream>(is_hip && number == 1 ? 0 : number);
  }
  /// Fills the table from a library (of this name if the process has it, else of the system's).
  static bool load(const char* library, Driver* driver, std::string* why);
  /// The same from the first that can be used.
  static bool load(std::span<const SharedLibrary::Candidate> libraries, Driver* driver, std::string* why);
  /// Fills the table and initialises the driver. Why it cannot be used; empty: it can.
  std::string load(const SharedLibrary& library);

  /// To be called when a call has failed: HIP's last error is the thread's, and the program would take
  /// it for one of its own.
  void forget() const {
    if (is_hip) last_error();
  }
  /// Raises a DeviceError unless `result` is kSuccess. `what`: "cuEventRecord on device 0".
  void check(Result result, const std::string& what) const;
  /// The CUDA that it runs, 13, or the HIP; 0: unknown.
  int major_version() const;
  /// "13.0", or "of unknown version".
  std::string version() const;
  /// "CUDA_ERROR_OUT_OF_MEMORY (2: out of memory), driver 13.0"
  std::string describe(Result error) const;
};

}  // namespace multiring::cuda
