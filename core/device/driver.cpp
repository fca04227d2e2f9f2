#include "device/driver.h"

#include <dlfcn.h>

#include <mutex>
#include <utility>

namespace multiring::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string loader_error() {
  const char* const error = ::dlerror();
  return error != nullptr ? error : "unknown error of the dynamic loader";
}

template <class Function>
bool find_function(void* library, const char* name, Function* function, std::string* missing) {
  *function = reinterpret_cast<Function>(::dlsym(library, name));
  if (*function == nullptr && missing->empty()) *missing = name;
  return *function != nullptr;
}

bool find_functions(void* library, Driver* driver, std::string* missing) {
  bool all = true;
  const auto find = [&](const char* name, auto* function) {
    all = find_function(library, name, function, missing) && all;
  };
  find("cuInit", &driver->init);
  find("cuDriverGetVersion", &driver->driver_version);
  find("cuGetErrorName", &driver->error_name);
  find("cuGetErrorString", &driver->error_string);
  find("cuDeviceGet", &driver->device_get);
  find("cuDevicePrimaryCtxRetain", &driver->primary_context_retain);
  find("cuCtxPushCurrent_v2", &driver->context_push);
  find("cuCtxPopCurrent_v2", &driver->context_pop);
  find("cuThreadExchangeStreamCaptureMode", &driver->exchange_capture_mode);
  find("cuPointerGetAttributes", &driver->pointer_attributes);
  find("cuStreamCreate", &driver->stream_create);
  find("cuStreamWaitEvent", &driver->stream_wait_event);
  find("cuStreamIsCapturing", &driver->stream_is_capturing);
  find("cuEventCreate", &driver->event_create);
  find("cuEventRecord", &driver->event_record);
  find("cuEventQuery", &driver->event_query);
  find("cuEventSynchronize", &driver->event_synchronize);
  find("cuMemHostAlloc", &driver->host_alloc);
  find("cuMemFreeHost", &driver->host_free);
  find("cuMemAlloc_v2", &driver->memory_alloc);
  find("cuMemFree_v2", &driver->memory_free);
  find("cuMemcpyDtoHAsync_v2", &driver->copy_to_host);
  find("cuMemcpyHtoDAsync_v2", &driver->copy_to_device);
  return all;
}

/// Versions are asked for only where something is wrong.
std::string version_of(const Driver& driver) {
  int version = 0;
  if (driver.driver_version == nullptr || driver.driver_version(&version) != kSuccess)
    return "of unknown version";
  return version_text(version);
}

const char* advice(Result error) {
  if (error == kOutOfMemory) return " Free memory of the device, or of the host where it is to be pinned.";
  // From 700 on a kernel has failed, and every later call in the process returns the same.
  if (error >= kIllegalAddress && error < 720)
    return " Work that the program gave the device before has failed; CUDA_LAUNCH_BLOCKING=1 shows where.";
  return "";
}

}  // namespace

bool Driver::load(const char* library, Driver* driver, std::string* why) {
  *driver = {};
  void* handle = ::dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) handle = ::dlopen(library, RTLD_NOW);
  if (handle == nullptr) return *why = loader_error(), false;
  std::string missing;
  if (!find_functions(handle, driver, &missing)) {
    *why = std::string(library) + " (driver " + version_of(*driver) + ") has no function " + missing +
           ": a newer driver is needed";
    return false;
  }
  const Result result = driver->init(0);
  if (result == kSuccess) return true;
  *why = "cuInit failed: " + driver->describe(result);
  return false;
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

std::string Driver::describe(Result error) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (error_name(error, &name) != kSuccess || name == nullptr) name = "unknown error";
  if (error_string(error, &text) != kSuccess || text == nullptr) text = "no text";
  return std::string(name) + " (" + std::to_string(error) + ": " + text + "), driver " + version_of(*this);
}

void Driver::check(Result result, const std::string& what) const {
  if (result == kSuccess) return;
  throw DeviceError(ErrorKind::kInternal, what + " failed: " + describe(result) + "." + advice(result));
}

}  // namespace multiring::cuda
