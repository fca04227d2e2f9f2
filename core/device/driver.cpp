#include "device/driver.h"

#include <mutex>
#include <utility>

namespace multiring::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

void fill_for_peers(const SharedLibrary& library, Driver* driver) {
  FunctionFinder find(library);
  find("cuDeviceGetAttribute", &driver->device_attribute);
  find("cuModuleLoadData", &driver->module_load);
  find("cuModuleGetFunction", &driver->module_function);
  find("cuLaunchKernel", &driver->launch_kernel);
  find("cuIpcGetMemHandle", &driver->ipc_export);
  find("cuIpcOpenMemHandle_v2", &driver->ipc_import);
  find("cuIpcCloseMemHandle", &driver->ipc_close);
  driver->missing_for_peers = find.missing();
}

/// The first function that the library lacks and has to have; empty: none.
std::string fill(const SharedLibrary& library, Driver* driver) {
  FunctionFinder find(library);
  find("cuInit", &driver->init);
  find("cuDriverGetVersion", &driver->driver_version);
  find("cuGetErrorName", &driver->error_name);
  find("cuGetErrorString", &driver->error_string);
  find("cuDeviceGetCount", &driver->device_count);
  find("cuDeviceGet", &driver->device_get);
  find("cuDeviceGetUuid", &driver->device_uuid);
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
  find("cuMemcpyDtoDAsync_v2", &driver->copy_on_device);
  fill_for_peers(library, driver);
  return find.missing();
}

const char* advice(Result error) {
  if (error == kOutOfMemory) return " Free memory of the device, or of the host where it is to be pinned.";
  // A kernel has failed (an illegal address; timeout; exceptions of the hardware), and every later call in
  // the process returns the same.
  if (error == kIllegalAddress || error == 702 || (error >= 714 && error < 720))
    return " Work that the program gave the device before has failed; CUDA_LAUNCH_BLOCKING=1 shows where.";
  return "";
}

}  // namespace

std::string Driver::load(const SharedLibrary& library) {
  *this = {};
  const std::string missing = fill(library, this);
  if (!missing.empty())
    return "driver " + version() + " has no function " + missing + ": a newer driver is needed";
  library.keep();
  const Result result = init(0);
  return result == kSuccess ? "" : "cuInit failed: " + describe(result);
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

int Driver::major_version() const {
  int number = 0;
  return driver_version != nullptr && driver_version(&number) == kSuccess ? number / 1000 : 0;
}

// Asked for only where something is wrong, or shown.
std::string Driver::version() const {
  int number = 0;
  if (driver_version == nullptr || driver_version(&number) != kSuccess) return "of unknown version";
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
