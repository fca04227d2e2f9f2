#include "collective/device/peer_buffers.h"

#include <unistd.h>

#include <array>
#include <cstring>
#include <random>

#include "base/text.h"
#include "collective/device/device_offers.h"
#include "device/peer_kernels.h"

namespace multiring {

/// Why a rank cannot do its part; empty: it can.
class PeerBuffers::Reason {
 public:
  void set(const std::string& text) {
    const std::size_t length = cut_length(text, text_.size() - 1);
    std::memcpy(text_.data(), text.data(), length);
    text_[length] = '\0';
  }
  std::string text() const { return {text_.data(), ::strnlen(text_.data(), text_.size())}; }

 private:
  std::array<char, 320> text_{};
};

/// What a rank tells of its buffer, through staging memory.
struct PeerBuffers::Offered {
  Reason why_not;
  cuda::IpcHandle handle;
  std::uint64_t process = 0;
  int process_id = 0;
  std::array<char, 16> device{};
  std::uintptr_t address = 0;  ///< for ranks that are threads of one process
};

namespace {

/// Tells this process from all others, in whatever container they are.
std::uint64_t process_number() {
  static const std::uint64_t number = [] {
    std::random_device random;
    return std::uint64_t{random()} << 32U | random();
  }();
  return number;
}

/// Of the first rank that has one.
std::string refusal_of(const std::vector<PeerBuffers::Reason>& reasons, const RoundExchange& exchange) {
  for (std::size_t rank = 0; rank < reasons.size(); ++rank)
    if (const std::string text = reasons[rank].text(); !text.empty())
      return exchange.name_of(static_cast<int>(rank)) + ": " + text;
  return "";
}

}  // namespace

/// This rank's part, by itself.
PeerBuffers::Offered PeerBuffers::make(std::size_t wanted) {
  Offered made;
  try {
    const cuda::Driver& driver = devices->driver();
    own = devices->take_shared(device, wanted);
    bytes = wanted;
    const Devices::Current current(*devices, device);
    stream = devices->take_stream(device);
    cuda::Device handle = 0;
    made.address = reinterpret_cast<std::uintptr_t>(own);
    driver.check(driver.ipc_export(&made.handle, made.address), cuda::on("cuIpcGetMemHandle", device));
    driver.check(driver.device_get(&handle, device), cuda::on("cuDeviceGet", device));
    driver.check(driver.device_uuid(made.device.data(), handle), cuda::on("cuDeviceGetUuid", device));
    made.process = process_number();
    made.process_id = ::getpid();
  } catch (const DeviceError& error) {
    made.why_not.set(error.what());
  }
  return made;
}

/// Has the buffers of the others.
PeerBuffers::Reason PeerBuffers::open(const std::vector<Offered>& all, int rank) {
  Reason why_not;
  const Offered& mine = all[static_cast<std::size_t>(rank)];
  try {
    const Devices::Current current(*devices, device);
    for (const Offered& each : all) {
      cuda::Pointer address = each.address;
      if (each.process != mine.process || each.process_id != mine.process_id) {
        devices->driver().check(devices->driver().ipc_import(&address, each.handle, cuda::kIpcEnableAccess),
                                cuda::on("cuIpcOpenMemHandle", device));
        imported.push_back(address);
      } else if (each.device != mine.device) {
        throw DeviceError(ErrorKind::kUsage, "ranks of one process have their arrays on different devices");
      }
      addresses.push_back(reinterpret_cast<std::byte*>(address));
    }
  } catch (const DeviceError& error) {
    why_not.set(error.what());
  }
  return why_not;
}

std::string PeerBuffers::set_up(RoundExchange& exchange, const OperationCall& call, std::size_t wanted) {
  const std::vector<Offered> all = exchanged(exchange, call, make(wanted));
  std::vector<Reason> reasons;
  for (const Offered& each : all) reasons.push_back(each.why_not);
  const std::string refusal = refusal_of(reasons, exchange);
  return refusal.empty() ? refusal_of(exchanged(exchange, call, open(all, exchange.rank())), exchange)
                         : refusal;
}

std::string PeerBuffers::compile(RoundExchange& exchange, const OperationCall& call, DType dtype) {
  Reason why_not;
  cuda::Function kernel = nullptr;
  try {
    kernel = peer::reduce_kernel(*devices, device, dtype);
  } catch (const DeviceError& error) {
    why_not.set(error.what());
  }
  std::string refusal = refusal_of(exchanged(exchange, call, why_not), exchange);
  kernels[static_cast<int>(dtype)] = refusal.empty() ? kernel : nullptr;
  return refusal;
}

void PeerBuffers::close() {
  addresses.clear();
  if (own != nullptr) devices->release_shared(device, bytes, std::exchange(own, nullptr));
  if (imported.empty()) return;
  const Devices::Current current(*devices, device);
  for (const cuda::Pointer each : std::exchange(imported, {})) devices->driver().ipc_close(each);
}

}  // namespace multiring
