#include "device/driver.h"

#include <algorithm>
#include <mutex>
#include <string_view>
#include <utility>

namespace multiring::cuda {
namespace {

const std::string kCuda[] = {"libcuda.so.1"};
const std::string kHip[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"};

// How versions are numbers: 13000 is CUDA 13.0, 60443484 is HIP 6.4.
constexpr int kCudaMajor = 1000, kCudaMinor = 10;
constexpr int kHipMajor = 10'000'000, kHipMinor = 100'000;
constexpr int kOldestHip = 6;

/// HIP's name of a function of CUDA's driver; most follow a rule.
std::string hip_name(std::string_view cuda) {
  static constexpr std::pair<std::string_view, const char*> kOthers[] = {
      {"cuGetErrorName", "hipDrvGetErrorName"},
      {"cuGetErrorString", "hipDrvGetErrorString"},
      {"cuDeviceGetCount", "hipGetDeviceCount"},
      {"cuPointerGetAttributes", "hipDrvPointerGetAttributes"},
      {"cuStreamCreate", "hipStreamCreateWithFlags"},
      {"cuEventCreate", "hipEventCreateWithFlags"},
      {"cuMemHostAlloc", "hipHostMalloc"},
      {"cuMemFreeHost", "hipHostFree"},
      {"cuMemAlloc", "hipMalloc"},
      {"cuMemFree", "hipFree"}};
  if (cuda.ends_with("_v2")) cuda.remove_suffix(3);
  for (const auto& [other, name] : kOthers)
    if (cuda == other) return name;
  return "hip" + std::string(cuda.substr(2));
}

/// "hipEventRecord on device 0" of "cuEventRecord on device 0".
std::string in_words_of_hip(const std::string& what) {
  if (!what.starts_with("cu")) return what;
  const std::size_t end = std::min(what.find(' '), what.size());
  return hip_name(std::string_view(what).substr(0, end)) + what.substr(end);
}

/// FunctionFinder for CUDA's names, which are translated where the library is HIP.
class DriverFinder {
 public:
  DriverFinder(const SharedLibrary& library, bool is_hip) : find_(library), is_hip_(is_hip) {}
  template <class Function>
  void operator()(const char* name, Function* function) {
    find_(is_hip_ ? hip_name(name).c_str() : name, function);
  }
  const std::string& missing() const { return find_.missing(); }

 private:
  FunctionFinder find_;
  const bool is_hip_;
};

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
  driver->is_hip = library.find("hipInit") != nullptr;
  DriverFinder find(library, driver->is_hip);
  find("cuInit", &driver->init);
  find("cuDriverGetVersion", &driver->driver_version);
  find("cuGetErrorName", &driver->error_name);
  find("cuGetErrorString", &driver->error_string);
  find("cuDeviceGetCount", &driver->device_count);
  find("cuDeviceGet", &driver->device_get);
  find("cuDeviceGetUuid", &driver->device_uuid);
  find("cuDeviceGetPCIBusId", &driver->device_pci_id);
  if (driver->is_hip) {
    find("cuGetDevice", &driver->get_device);
    find("cuSetDevice", &driver->set_device);
    find("cuGetLastError", &driver->last_error);
  } else {
    find("cuDevicePrimaryCtxRetain", &driver->primary_context_retain);
    find("cuCtxPushCurrent_v2", &driver->context_push);
    find("cuCtxPopCurrent_v2", &driver->context_pop);
  }
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
  DriverFinder(library, driver->is_hip)("cuDeviceCanAccessPeer", &driver->can_access_peer);
  if (!driver->is_hip) fill_for_peers(library, driver);
  return find.missing();
}

const char* advice(Result error) {
  if (error == kOutOfMemory) return " Free memory of the device, or of the host where it is to be pinned.";
  // A kernel has failed (an illegal address; timeout; exceptions of the hardware), and every later call in
  // the process returns the same.
  if (error == kIllegalAddress || error == 702 || (error >= 714 && error < 720))
    return " Work that the program gave the device before has failed; CUDA_LAUNCH_BLOCKING=1 "
           "(AMD_SERIALIZE_KERNEL=3) shows where.";
  return "";
}

}  // namespace

std::string Driver::load(const SharedLibrary& library) {
  *this = {};
  const std::string missing = fill(library, this);
  // From here on it may have threads: HIP starts when it is asked for its version.
  if (is_hip || missing.empty()) library.keep();
  if (!missing.empty())
    return "driver " + version() + " has no function " + missing + ": a newer driver is needed";
  if (is_hip && major_version() < kOldestHip)
    return "HIP " + version() + ", whose kinds of memory have other numbers: ROCm 6 or newer is needed";
  const Result result = init(0);
  return result == kSuccess ? ""
                            : std::string(is_hip ? "hipInit" : "cuInit") + " failed: " + describe(result);
}

bool Driver::load(const char* library, Driver* driver, std::string* why) {
  const std::string names[] = {library};
  return load(SharedLibrary::candidates(names, "", {}), driver, why);
}

bool Driver::load(std::span<const SharedLibrary::Candidate> libraries, Driver* driver, std::string* why) {
  const auto refuse = [driver](const SharedLibrary& found) { return driver->load(found); };
  return SharedLibrary::open(libraries, refuse, why).has_value();
}

const Driver* Driver::find(std::string* why) {
  static Driver driver;
  static std::string reason;
  static bool usable = false;
  static std::once_flag once;
  std::call_once(once, [] {
    // One by one: a library that is there and of no use ends its own search.
    std::string whys[2];
    for (const bool is_loaded : {true, false})
      for (std::size_t maker = 0; maker < 2 && !usable; ++maker) {
        if (!whys[maker].empty()) continue;
        auto places =
            SharedLibrary::candidates(maker == 0 ? std::span<const std::string>(kCuda) : kHip, "", {});
        std::erase_if(places, [&](const auto& each) { return each.has_to_be_there != is_loaded; });
        usable = load(places, &driver, &whys[maker]);
      }
    reason = whys[0] + "; " + whys[1];
  });
  if (usable) return &driver;
  *why = reason;
  return nullptr;
}

int Driver::major_version() const {
  int number = 0;
  const int major = is_hip ? kHipMajor : kCudaMajor;
  return driver_version != nullptr && driver_version(&number) == kSuccess ? number / major : 0;
}

// Asked for only where something is wrong, or shown.
std::string Driver::version() const {
  int number = 0;
  if (driver_version == nullptr || driver_version(&number) != kSuccess) return "of unknown version";
  const auto text = [number](int major, int minor) {
    return std::to_string(number / major) + "." + std::to_string(number % major / minor);
  };
  return is_hip ? text(kHipMajor, kHipMinor) : text(kCudaMajor, kCudaMinor);
}

std::string Driver::describe(Result error) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (error_name(error, &name) != kSuccess || name == nullptr) name = "unknown error";
  if (error_string(error, &text) != kSuccess || text == nullptr) text = "no text";
  return std::string(name) + " (" + std::to_string(error) + ": " + text + "), " +
         (is_hip ? "HIP " : "driver ") + version();
}

void Driver::check(Result result, const std::string& what) const {
  if (result == kSuccess) return;
  forget();
  throw DeviceError(ErrorKind::kInternal, (is_hip ? in_words_of_hip(what) : what) +
                                              " failed: " + describe(result) + "." + advice(result));
}

}  // namespace multiring::cuda
