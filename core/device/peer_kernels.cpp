#include "device/peer_kernels.h"

#include <algorithm>
#include <vector>

#include "device/nvrtc.h"

namespace multiring::peer {
namespace {

int attribute_of(Devices& devices, int device, cuda::DeviceAttribute attribute) {
  const cuda::Driver& driver = devices.driver();
  cuda::Device handle = 0;
  int value = 0;
  driver.check(driver.device_get(&handle, device), cuda::on("cuDeviceGet", device));
  driver.check(driver.device_attribute(&value, attribute, handle), cuda::on("cuDeviceGetAttribute", device));
  return value;
}

const nvrtc::Library* compiler(const cuda::Driver& driver, std::string* why) {
  return nvrtc::Library::find(driver.major_version(), why);
}

std::vector<char> compiled(Devices& devices, int device, DType dtype) {
  std::string why;
  const nvrtc::Library* const library = compiler(devices.driver(), &why);
  if (library == nullptr) throw DeviceError(ErrorKind::kInternal, why);
  const int capability = attribute_of(devices, device, cuda::kCapabilityMajor) * 10 +
                         attribute_of(devices, device, cuda::kCapabilityMinor);
  // As the host computes: no fused operations, denormals kept, quotients rounded to nearest.
  const std::string options[] = {"--gpu-architecture=sm_" + std::to_string(capability),
                                 "--std=c++17",
                                 "--fmad=false",
                                 "--ftz=false",
                                 "--prec-div=true",
                                 "-DMULTIRING_DTYPE=" + std::to_string(static_cast<int>(dtype))};
  return library->compile(kReduceSource, options);
}

}  // namespace

std::string why_no_peers(const cuda::Driver& driver) {
  if (driver.is_hip) return "devices of AMD have none";
  if (driver.missing_for_peers.empty()) return "";
  return "driver " + driver.version() + " has no function " + driver.missing_for_peers;
}

std::string why_no_kernels(const cuda::Driver& driver) {
  if (const std::string why = why_no_peers(driver); !why.empty()) return why;
  constexpr int kOldest = 12;
  if (driver.major_version() < kOldest) return "driver " + driver.version() + " is older than CUDA 12";
  std::string why;
  return compiler(driver, &why) != nullptr ? "" : "there is no NVRTC: " + why;
}

cuda::Function reduce_kernel(Devices& devices, int device, DType dtype) {
  return devices.function(device, static_cast<int>(dtype), "multiring_reduce",
                          [&] { return compiled(devices, device, dtype); });
}

void launch(Devices& devices, int device, cuda::Function kernel, const ReduceJob& job, cuda::Stream stream) {
  constexpr unsigned kThreads = 512;
  constexpr unsigned long long kBlocksEach = 4;  // of a multiprocessor, which has room for no more threads
  const auto most =
      kBlocksEach * static_cast<unsigned long long>(attribute_of(devices, device, cuda::kMultiprocessors));
  const auto blocks = static_cast<unsigned>(std::clamp((job.count + kThreads - 1) / kThreads, 1ULL, most));
  ReduceJob argument = job;
  void* arguments[] = {&argument};
  devices.driver().check(
      devices.driver().launch_kernel(kernel, blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr),
      cuda::on("cuLaunchKernel", device));
}

}  // namespace multiring::peer
