#include "device/driver.h"

#include <mutex>
#include <utility>

namespace multiring::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

/// The first function of the table that the library lacks; empty: none.
std::string fill(const SharedLibrary& library, Api api, Driver* driver) {
  std::string missing;
  const auto find = [&]<class Function>(const char* cuda, const char* hip, Function* function) {
    const char* const name = api == Api::kCuda ? cuda : hip;
    *function = reinterpret_cast<Function>(library.find(name));
    if (*function == nullptr && missing.empty()) missing = name;
  };
  find("cuInit", "hipInit", &driver->init);
  find("cuDriverGetVersion", "hipDriverGetVersion", &driver->driver_version);
  find("cuGetErrorName", "hipDrvGetErrorName", &driver->error_name);
  find("cuGetErrorString", "hipDrvGetErrorString", &driver->error_string);
  find("cuDeviceGetCount", "hipGetDeviceCount", &driver->device_count);
  find("cuDeviceGet", "hipDeviceGet", &driver->device_get);
  find("cuDevicePrimaryCtxRetain", "hipDevicePrimaryCtxRetain", &driver->primary_context_retain);
  find("cuCtxPushCurrent_v2", "hipCtxPushCurrent", &driver->context_push);
  find("cuCtxPopCurrent_v2", "hipCtxPopCurrent", &driver->context_pop);
  find("cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode",
       &driver->exchange_capture_mode);
  find("cuPointerGetAttributes", "hipDrvPointerGetAttributes", &driver->pointer_attributes);
  find("cuStreamCreate", "hipStreamCreateWithFlags", &driver->stream_create);
  find("cuStreamWaitEvent", "hipStreamWaitEvent", &driver->stream_wait_event);
  find("cuStreamIsCapturing", "hipStreamIsCapturing", &driver->stream_is_capturing);
  find("cuEventCreate", "hipEventCreateWithFlags", &driver->event_create);
  find("cuEventRecord", "hipEventRecord", &driver->event_record);
  find("cuEventQuery", "hipEventQuery", &driver->event_query);
  find("cuEventSynchronize", "hipEventSynchronize", &driver->event_synchronize);
  find("cuMemHostAlloc", "hipHostMalloc", &driver->host_alloc);
  find("cuMemFreeHost", "hipHostFree", &driver->host_free);
  find("cuMemAlloc_v2", "hipMalloc", &driver->memory_alloc);
  find("cuMemFree_v2", "hipFree", &driver->memory_free);
  find("cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync", &driver->copy_to_host);
  find("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync", &driver->copy_to_device);
  return missing;
}

const char* advice(Result error) {
  if (error == kOutOfMemory) return " Free memory of the device, or of the host where it is to be pinned.";
  // From 700 on a kernel has failed, and every later call in the process returns the same.
  if (error >= kIllegalAddress && error < 720)
    return " Work that the program gave the device before has failed; CUDA_LAUNCH_BLOCKING=1 shows where.";
  return "";
}

}  // namespace

std::string Driver::load(const SharedLibrary& library, Api api) {
  *this = {};
  const std::string missing = fill(library, api, this);
  if (!missing.empty())
    return "driver " + version() + " has no function " + missing + ": a newer driver is needed";
  const Result result = init(0);
  return result == kSuccess
             ? ""
             : std::string(api == Api::kCuda ? "cuInit" : "hipInit") + " failed: " + describe(result);
}

bool Driver::load(const char* library, Driver* driver, std::string* why) {
  const std::string names[] = {library};
  const auto refuse = [driver](const SharedLibrary& found) { return driver->load(found); };
  return SharedLibrary::open(SharedLibrary::candidates(names, "", {}), refuse, why).has_value();
}

const Driver* Driver::find(std::string* why) {
  static Driver driver;
  static std::string reason;
  static bool usable = false;
  static std::once_flag once;
  std::call_once(once, [] { usable = load(kLibrary, &driver, &reason); });
  if (usable) return &driver;
  *why = reason;
  return nullptr;
}

// Asked for only where something is wrong, or shown.
std::string Driver::version() const {
  int number = 0;
  if (driver_version == nullptr || driver_version(&number) != kSuccess) return "of unknown version";
  constexpr int kHipMajor = 10'000'000;
  if (number >= kHipMajor)
    return std::to_string(number / kHipMajor) + "." + std::to_string(number % kHipMajor / 100'000);
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

std::string Driver::describe(Result error) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (error_name(error, &name) != kSuccess || name == nullptr) name = "unknown error";
  if (error_string(error, &text) != kSuccess || text == nullptr) text = "no text";
  return std::string(name) + " (" + std::to_string(error) + ": " + text + "), driver " + version();
}

void Driver::check(Result result, const std::string& what) const {
  if (result == kSuccess) return;
  throw DeviceError(ErrorKind::kInternal, what + " failed: " + describe(result) + "." + advice(result));
}

}  // namespace multiring::cuda
