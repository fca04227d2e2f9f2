#include "device/ipc_trial.h"

#include <memory>

#include "device/devices.h"

namespace multiring {
namespace {

/// Those of the process, if its driver has what that takes.
std::shared_ptr<Devices> devices_with_ipc() {
  std::shared_ptr<Devices> devices = Devices::require();
  const cuda::Driver& driver = devices->driver();
  if (driver.is_hip) throw_usage("memory of HIP's devices is not shared");
  if (driver.missing_for_peers.empty()) return devices;
  throw_usage("driver " + driver.version() + " has no function " + driver.missing_for_peers);
}

}  // namespace

SharedDeviceMemory export_device_memory(int device) {
  const std::shared_ptr<Devices> devices = devices_with_ipc();
  SharedDeviceMemory made;
  made.address = reinterpret_cast<std::uintptr_t>(devices->take_shared(device, kIpcTrialBytes));
  const Devices::Current current(*devices, device);
  const cuda::Driver& driver = devices->driver();
  driver.check(driver.ipc_export(&made.handle, made.address), cuda::on("cuIpcGetMemHandle", device));
  return made;
}

std::uintptr_t import_device_memory(const cuda::IpcHandle& handle, int device) {
  const std::shared_ptr<Devices> devices = devices_with_ipc();
  const Devices::Current current(*devices, device);
  const cuda::Driver& driver = devices->driver();
  cuda::Pointer address = 0;
  driver.check(driver.ipc_import(&address, handle, cuda::kIpcEnableAccess),
               cuda::on("cuIpcOpenMemHandle", device));
  return address;
}

}  // namespace multiring
