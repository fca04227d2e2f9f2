#pragma once

#include <string>

#include "base/arithmetic/dtype.h"
#include "base/export.h"
#include "device/devices.h"
#include "device/kernels/reduce.inc"

namespace multiring::peer {

/// The text of kernels/reduce.inc, which is part of the library (core/CMakeLists.txt).
extern const char* const kReduceSource;

/// Why ranks cannot have one another's device memory here; empty: they can.
MULTIRING_API std::string why_no_peers(const cuda::Driver& driver);
/// Why kernels cannot be had here, whatever the device is; empty: they can.
MULTIRING_API std::string why_no_kernels(const cuda::Driver& driver);

/// The kernel that reduces a dtype, compiled when it is first asked for on a device. Raises a DeviceError.
MULTIRING_API cuda::Function reduce_kernel(Devices& devices, int device, DType dtype);

/// Gives a stream the kernel to run. The device's context has to be current.
MULTIRING_API void launch(Devices& devices, int device, cuda::Function kernel, const ReduceJob& job,
                          cuda::Stream stream);

}  // namespace multiring::peer
