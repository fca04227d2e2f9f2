#include "binding/arrays/devices.h"

#include "base/error.h"

namespace multiring::binding {
namespace {

DeviceArrays& on_devices(Operation& operation) {
  if (operation.on_devices == nullptr) {
    std::string why;
    operation.on_devices = std::make_unique<DeviceArrays>();
    operation.on_devices->devices = find_devices(&why);
    if (operation.on_devices->devices == nullptr) throw_usage("device memory without a driver: " + why);
  }
  return *operation.on_devices;
}

}  // namespace

std::shared_ptr<Devices> find_devices(std::string* why) {
  const cuda::Driver* const driver = cuda::Driver::find(why);
  if (driver == nullptr) return nullptr;
  static auto* const devices = new std::shared_ptr<Devices>(std::make_shared<Devices>(*driver));
  return *devices;
}

void set_input(Operation& operation, const Buffer& memory) {
  operation.input = memory.address;
  if (memory.on_device()) on_devices(operation).input = memory;
}

void set_output(Operation& operation, const Buffer& memory) {
  operation.output = memory.address;
  operation.output_bytes = memory.bytes;
  if (memory.on_device()) on_devices(operation).output = memory;
}

}  // namespace multiring::binding
