#include "binding/arrays/devices.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstring>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "binding/gil.h"
#include "binding/interrupt.h"
#include "device/ipc_trial.h"
#include "device/libraries.h"
#include "device/shared_library.h"
#include "device/staging.h"

namespace multiring::binding {
namespace {

namespace py = pybind11;

/// Once, as the program has sys.path at its first array on a device, or when native code is to have some: the
/// folders of wheels. None that is relative, where anyone may have put a library.
void tell_sites() {
  static bool told = false;
  if (told) return;
  std::vector<std::string> sites;
  for (const py::handle& place : py::module_::import("sys").attr("path")) {
    const auto path = py::reinterpret_steal<py::bytes>(PyUnicode_EncodeFSDefault(place.ptr()));
    if (!path) PyErr_Clear();  // no text, as sys.path may have it
    if (path && std::string_view(path).starts_with('/')) sites.emplace_back(path);
  }
  SharedLibrary::look_in(std::move(sites));
  told = true;
}

Buffer memory_at(std::uintptr_t address, std::size_t bytes, int device, std::uintptr_t stream) {
  return {reinterpret_cast<std::byte*>(address), bytes, MemoryKind::kDevice, device, stream};
}

py::array_t<std::uint8_t> copy_from_device(std::uintptr_t address, std::size_t bytes, int device,
                                           std::uintptr_t stream) {
  py::array_t<std::uint8_t> result(static_cast<py::ssize_t>(bytes));
  auto* const to = result.mutable_data();
  const GilRelease release;
  Staging(Devices::require()).read(memory_at(address, bytes, device, stream), to, check_signals());
  return result;
}

void copy_to_device(std::uintptr_t address, const py::array_t<std::uint8_t, py::array::c_style>& data,
                    int device, std::uintptr_t stream) {
  const auto bytes = static_cast<std::size_t>(data.nbytes());
  const auto* const from = data.data();
  const GilRelease release;
  const Buffer to = memory_at(address, bytes, device, stream);
  Staging staging(Devices::require());
  std::byte* const memory = staging.reserve(to);
  staging.await(check_signals());
  std::memcpy(memory, from, bytes);
  staging.copy_back(to, memory, bytes);
  staging.finish();
}

std::pair<py::bytes, std::uintptr_t> export_memory(int device) {
  SharedDeviceMemory made;
  {
    const GilRelease release;
    made = export_device_memory(device);
  }
  return {py::bytes(made.handle.bytes.data(), made.handle.bytes.size()), made.address};
}

std::uintptr_t import_memory(const py::bytes& given, int device) {
  const std::string_view bytes = given;
  cuda::IpcHandle handle;
  if (bytes.size() != handle.bytes.size()) throw_usage("this is no handle of a device's memory");
  std::memcpy(handle.bytes.data(), bytes.data(), bytes.size());
  const GilRelease release;
  return import_device_memory(handle, device);
}

}  // namespace

dlpack::DeviceType kind_of_devices(const Devices& devices) {
  return devices.driver().is_hip ? dlpack::kRocm : dlpack::kCuda;
}

DeviceArrays& arrays_on_devices(Operation& operation) {
  if (operation.on_devices == nullptr) {
    operation.on_devices = std::make_unique<DeviceArrays>();
    operation.on_devices->devices = Devices::require();
    tell_sites();
  }
  return *operation.on_devices;
}

void set_input(Operation& operation, const Buffer& memory) {
  operation.input = memory.address;
  if (memory.on_device()) arrays_on_devices(operation).input = memory;
}

void set_output(Operation& operation, const Buffer& memory) {
  operation.output = memory.address;
  operation.output_bytes = memory.bytes;
  if (memory.on_device()) arrays_on_devices(operation).output = memory;
}

void bind_devices(py::module_& module) {
  py::class_<DeviceLibrary>(module, "DeviceLibrary", "A library for devices, and why none can be used.")
      .def_readonly("name", &DeviceLibrary::name)
      .def_readonly("path", &DeviceLibrary::path)
      .def_readonly("origin", &DeviceLibrary::origin)
      .def_readonly("version", &DeviceLibrary::version)
      .def_readonly("why", &DeviceLibrary::why)
      .def_readonly("devices", &DeviceLibrary::devices)
      .def_readonly("pairs_without_access", &DeviceLibrary::pairs_without_access);
  module.def(
      "find_device_libraries",
      [](const std::vector<std::string>& sites) {
        const GilRelease release;
        return find_device_libraries(sites);
      },
      py::arg("sites"), "Opens the libraries for devices; sites: folders that wheels are installed in.");
  module.def("tell_sites", &tell_sites,
             "Lets libraries for devices be found in the folders of sys.path; for arrays of native code.");
  module.def(
      "device_of",
      [](std::uintptr_t address) {
        Buffer memory{.address = reinterpret_cast<std::byte*>(address)};
        Devices::require()->locate(memory);
        return memory.on_device() ? memory.device : -1;
      },
      py::arg("address"), "The device whose memory an address is of; -1: memory of the host.");
  module.def("export_device_memory", &export_memory, py::arg("device"),
             "2 MiB for another process to have, until this one ends: its handle, and its address here.");
  module.def("import_device_memory", &import_memory, py::arg("handle"), py::arg("device"),
             "The address of memory of another process, for what works on `device`.");
  module.def("copy_from_device", &copy_from_device, py::arg("address"), py::arg("nbytes"), py::arg("device"),
             py::arg("stream"), "Memory of a device as bytes, after the work that the stream has now.");
  module.def("copy_to_device", &copy_to_device, py::arg("address"), py::arg("data"), py::arg("device"),
             py::arg("stream"),
             "Writes bytes to memory of a device, after the work that the stream has now.");
}

}  // namespace multiring::binding
