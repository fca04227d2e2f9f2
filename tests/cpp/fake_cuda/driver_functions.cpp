// The functions of libcuda.so.1 that are used, over a FakeMachine. Whatever needs a context, of the stream's
// own device, fails without it.

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <utility>

#include "fake_cuda/machine.h"

#define FAKE_CUDA extern "C" __attribute__((visibility("default")))

namespace multiring::testing {
namespace {

using namespace cuda;  // NOLINT: the types of the driver
constexpr Result kNoDevice = 100;
constexpr Result kInvalidDevice = 101;
constexpr Result kPeerAccessUnsupported = 217;
constexpr Result kCaptureUnsupported = 900;

// The stand-in for HIP is this one with other names, and one stream less (tests/gpu/stand_in.py).
#ifdef FAKE_HIP
constexpr bool kIsHip = true;
#else
constexpr bool kIsHip = false;
#endif

thread_local std::vector<int> contexts;  // devices, the last one is current
thread_local int capture_mode = 0;
constexpr Result kCapturedEvent = 907;
thread_local Result last_error = kSuccess;  // of HIP: it stays until it is asked for

FakeMachine& machine() { return FakeMachine::current(); }

int current_device() { return contexts.empty() ? -1 : contexts.back(); }

Context context_of(int device) { return reinterpret_cast<Context>(static_cast<std::uintptr_t>(device) + 1); }

std::byte* as_memory(cuda::Pointer pointer) { return reinterpret_cast<std::byte*>(pointer); }

FakeMachine::Event& state(Event event) { return *reinterpret_cast<FakeMachine::Event*>(event); }

/// Holds the lock while a function runs. `result`: how the call fails, kSuccess if it does not.
struct Call {
  explicit Call(const char* function) : lock(machine().mutex()) {
    result = machine().enter(function, current_device());
    if (contexts.empty()) result = kInvalidContext;
  }
  Call(const char* function, Stream handle) : Call(function) {
    if (result != kSuccess) return;
    stream = machine().find_stream(reinterpret_cast<std::uintptr_t>(handle), current_device());
    const bool is_of_cuda = reinterpret_cast<std::uintptr_t>(handle) == Buffer::kDefaultStream;
    if (stream == nullptr || (kIsHip && is_of_cuda))
      result = kInvalidHandle;
    else if (stream->device != current_device())
      result = kIsHip ? kInvalidHandle : kInvalidContext;
  }
  ~Call() {
    if (result != kSuccess) last_error = result;
  }

  std::unique_lock<std::recursive_mutex> lock;
  FakeMachine::Stream* stream = nullptr;
  Result result;
};

Result copy(const char* function, void* to, const void* from, std::size_t bytes, Stream stream) {
  const Call call(function, stream);
  if (call.result != kSuccess) return call.result;
  return machine().enqueue_copy(*call.stream, to, from, bytes) ? kSuccess : kInvalidValue;
}

Result allocate_on_host(const char* function, void** memory, std::size_t bytes, MemoryKind kind) {
  const Call call(function);
  if (call.result != kSuccess) return call.result;
  *memory = machine().allocate_on_host(current_device(), bytes, kind);
  return *memory != nullptr ? kSuccess : kOutOfMemory;
}

Result release(const char* function, void* memory) {
  const Call call(function);
  if (call.result != kSuccess) return call.result;
  return machine().release(static_cast<std::byte*>(memory)) ? kSuccess : kInvalidValue;
}

}  // namespace
}  // namespace multiring::testing

using namespace multiring;           // NOLINT
using namespace multiring::testing;  // NOLINT
using namespace multiring::cuda;     // NOLINT

FAKE_CUDA Result cuInit(unsigned) {
  const std::lock_guard lock(machine().mutex());
  return machine().enter("init", -1);
}

FAKE_CUDA Result cuDriverGetVersion(int* version) { return *version = kIsHip ? 60443484 : 13000, kSuccess; }

FAKE_CUDA Result cuGetErrorName(Result error, const char** text) {
  *text = kIsHip                     ? "hipErrorOther"
          : error == kOutOfMemory    ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == kNoDevice       ? "CUDA_ERROR_NO_DEVICE"
          : error == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                     : "CUDA_ERROR_OTHER";
  return kSuccess;
}

FAKE_CUDA Result cuGetErrorString(Result, const char** text) { return *text = "as injected", kSuccess; }

FAKE_CUDA Result cuDeviceGetCount(int* count) { return *count = FakeMachine::kDevices, kSuccess; }

FAKE_CUDA Result cuDeviceGet(Device* device, int ordinal) {
  if (ordinal < 0 || ordinal >= FakeMachine::kDevices) return kInvalidDevice;
  return *device = ordinal, kSuccess;
}

FAKE_CUDA Result cuDeviceGetUuid(char* uuid, Device device) {
  std::memset(uuid, device + 1, 16);
  return kSuccess;
}

FAKE_CUDA Result cuDeviceGetPCIBusId(char* text, int room, Device device) {
  std::snprintf(text, static_cast<std::size_t>(room), "0000:%02x:00.0", device);
  return kSuccess;
}

FAKE_CUDA Result cuDeviceCanAccessPeer(int* can, Device device, Device peer) {
  const std::lock_guard lock(machine().mutex());
  *can = machine().can_access(device, peer) ? 1 : 0;
  return machine().enter("can_access_peer", -1);
}

#ifdef FAKE_HIP
// As HIP has it there is always one.
FAKE_CUDA Result hipGetDevice(int* ordinal) {
  *ordinal = contexts.empty() ? 0 : contexts.back();
  return kSuccess;
}

FAKE_CUDA Result hipSetDevice(int ordinal) {
  if (ordinal < 0 || ordinal >= FakeMachine::kDevices) return kInvalidDevice;
  contexts.assign(1, ordinal);
  return kSuccess;
}

FAKE_CUDA Result hipGetLastError() { return std::exchange(last_error, kSuccess); }
#endif

FAKE_CUDA Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  const std::lock_guard lock(machine().mutex());
  *context = context_of(device);
  return machine().enter("primary_context_retain", device);
}

FAKE_CUDA Result cuCtxPushCurrent_v2(Context context) {
  contexts.push_back(static_cast<int>(reinterpret_cast<std::uintptr_t>(context)) - 1);
  return kSuccess;
}

FAKE_CUDA Result cuCtxPopCurrent_v2(Context* context) {
  if (contexts.empty()) return kInvalidContext;
  *context = context_of(contexts.back());
  contexts.pop_back();
  return kSuccess;
}

FAKE_CUDA Result cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return kSuccess;
}

FAKE_CUDA Result cuPointerGetAttributes(unsigned count, PointerAttribute* attributes, void** values,
                                        Pointer pointer) {
  const std::lock_guard lock(machine().mutex());
  if (const Result failed = machine().enter("pointer_attributes", -1); failed != kSuccess) return failed;
  const FakeMachine::Block* const block = machine().block_of(as_memory(pointer));
  if (kIsHip && block == nullptr) return last_error = kInvalidValue;
  const MemoryKind kind = block != nullptr ? block->kind : MemoryKind::kHost;
  for (unsigned i = 0; i < count; ++i) {
    if (attributes[i] == kMemoryType)
      *static_cast<unsigned*>(values[i]) = kind == MemoryKind::kHost         ? 0
                                           : kind == MemoryKind::kPinnedHost ? unsigned{kHostMemory}
                                                                             : unsigned{kDeviceMemory};
    if (attributes[i] == kIsManaged) *static_cast<unsigned*>(values[i]) = kind == MemoryKind::kManaged;
    if (attributes[i] == kDeviceOrdinal)
      *static_cast<int*>(values[i]) = block != nullptr ? block->device : -2;
  }
  return kSuccess;
}

FAKE_CUDA Result cuStreamCreate(Stream* stream, unsigned) {
  const Call call("stream_create");
  if (call.result == kSuccess) *stream = reinterpret_cast<Stream>(&machine().make_stream(current_device()));
  return call.result;
}

FAKE_CUDA Result cuStreamWaitEvent(Stream stream, Event event, unsigned) {
  const Call call("stream_wait_event", stream);
  if (call.result == kSuccess) machine().wait(*call.stream, state(event));
  return call.result;
}

FAKE_CUDA Result cuStreamIsCapturing(Stream stream, int* status) {
  const Call call("stream_is_capturing", stream);
  const bool is_there = call.result == kSuccess || (kIsHip && call.stream != nullptr);
  if (is_there) *status = call.stream->capturing ? 1 : 0;
  return is_there ? kSuccess : call.result;
}

FAKE_CUDA Result cuStreamSynchronize(Stream stream) {
  Call call("stream_synchronize", stream);
  if (call.result != kSuccess) return call.result;
  return machine().await(machine().end_of(*call.stream), call.lock) ? kSuccess : kInvalidHandle;
}

FAKE_CUDA Result cuEventCreate(Event* event, unsigned) {
  const Call call("event_create");
  if (call.result == kSuccess) *event = reinterpret_cast<Event>(&machine().make_event(current_device()));
  return call.result;
}

FAKE_CUDA Result cuEventRecord(Event event, Stream stream) {
  const Call call("event_record", stream);
  if (call.result != kSuccess) return call.result;
  if (state(event).device != call.stream->device) return kInvalidHandle;
  if (call.stream->capturing) return kCaptureUnsupported;
  machine().record(*call.stream, state(event));
  return kSuccess;
}

FAKE_CUDA Result cuEventQuery(Event event) {
  const Call call("event_query");
  if (call.result != kSuccess) return call.result;
  if (current_device() != state(event).device) return kInvalidContext;
  if (capture_mode != kCaptureRelaxed) return kCaptureUnsupported;
  const auto& point = state(event).point;
  // HIP looks at the stream that has recorded the event.
  if (kIsHip && point != nullptr && point->stream->capturing) return kCapturedEvent;
  return machine().is_complete(state(event)) ? kSuccess : kNotReady;
}

FAKE_CUDA Result cuEventSynchronize(Event event) {
  Call call("event_synchronize");
  if (call.result != kSuccess) return call.result;
  if (machine().is_ignored(Ordering::kWait)) return kSuccess;
  return machine().await(state(event).point, call.lock) ? kSuccess : kInvalidHandle;
}

FAKE_CUDA Result cuMemHostAlloc(void** memory, std::size_t bytes, unsigned flags) {
  // With these HIP gives memory that need not be seen when an event is there.
  if (kIsHip && flags != 0) return kInvalidValue;
  return allocate_on_host("host_alloc", memory, bytes, MemoryKind::kPinnedHost);
}

FAKE_CUDA Result cuMemFreeHost(void* memory) { return release("host_free", memory); }

FAKE_CUDA Result cuMemAllocManaged(Pointer* memory, std::size_t bytes, unsigned) {
  void* made = nullptr;
  const Result result = allocate_on_host("managed_alloc", &made, bytes, MemoryKind::kManaged);
  *memory = reinterpret_cast<Pointer>(made);
  return result;
}

FAKE_CUDA Result cuMemAlloc_v2(Pointer* memory, std::size_t bytes) {
  const Call call("memory_alloc");
  if (call.result != kSuccess) return call.result;
  *memory = reinterpret_cast<Pointer>(machine().allocate(current_device(), bytes));
  return *memory != 0 ? kSuccess : kOutOfMemory;
}

FAKE_CUDA Result cuMemFree_v2(Pointer memory) { return release("memory_free", as_memory(memory)); }

FAKE_CUDA Result cuMemcpyDtoHAsync_v2(void* to, Pointer from, std::size_t bytes, Stream stream) {
  return copy("copy_to_host", to, as_memory(from), bytes, stream);
}

FAKE_CUDA Result cuMemcpyHtoDAsync_v2(Pointer to, const void* from, std::size_t bytes, Stream stream) {
  return copy("copy_to_device", as_memory(to), from, bytes, stream);
}

FAKE_CUDA Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, std::size_t bytes, Stream stream) {
  return copy("copy_on_device", as_memory(to), as_memory(from), bytes, stream);
}

FAKE_CUDA Result cuIpcGetMemHandle(FakeMachine::IpcHandle* handle, Pointer memory) {
  const Call call("ipc_export");
  if (call.result != kSuccess) return call.result;
  return machine().export_block(as_memory(memory), handle) ? kSuccess : kInvalidValue;
}

FAKE_CUDA Result cuIpcOpenMemHandle_v2(Pointer* memory, FakeMachine::IpcHandle handle, unsigned) {
  const Call call("ipc_import");
  if (call.result != kSuccess) return call.result;
  if (!machine().can_access(current_device(), handle.device)) return kPeerAccessUnsupported;
  *memory = reinterpret_cast<Pointer>(machine().import_block(handle));
  return *memory != 0 ? kSuccess : kInvalidContext;
}

FAKE_CUDA Result cuIpcCloseMemHandle(Pointer memory) { return release("ipc_close", as_memory(memory)); }
