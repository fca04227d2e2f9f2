#pragma once

#include <cstdint>

#include "base/export.h"
#include "device/driver.h"

namespace multiring {

/// Memory of a device that another process may have.
struct SharedDeviceMemory {
  cuda::IpcHandle handle;
  std::uintptr_t address = 0;
};

// To find out whether that works on this machine (`multiring doctor`). What is made stays until the process
// ends. These raise a DeviceError that names the function of the driver, or a usage error without a driver.

MULTIRING_API SharedDeviceMemory export_device_memory(int device);
/// Where a process that works on `device` has the memory that another one has exported.
MULTIRING_API std::uintptr_t import_device_memory(const cuda::IpcHandle& handle, int device);

/// Of what is exported.
inline constexpr std::size_t kIpcTrialBytes = std::size_t{2} << 20;

}  // namespace multiring
