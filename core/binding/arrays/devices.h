#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "binding/arrays/dlpack.h"
#include "collective/operation.h"
#include "device/devices.h"

namespace multiring::binding {

/// What DLPack calls memory on the devices of a process.
dlpack::DeviceType kind_of_devices(const Devices& devices);

/// The devices of an operation, which has none yet or these; a usage error if there is no driver.
DeviceArrays& arrays_on_devices(Operation& operation);

/// Sets the input, or the output, of an operation to the memory of an array, on a device or not.
void set_input(Operation& operation, const Buffer& memory);
void set_output(Operation& operation, const Buffer& memory);

void bind_devices(pybind11::module_& module);

}  // namespace multiring::binding
