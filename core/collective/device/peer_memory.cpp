#include "collective/device/peer_memory.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "collective/device/device_arrays.h"
#include "collective/device/device_offers.h"
#include "collective/device/peer_buffers.h"
#include "collective/kinds.h"
#include "collective/sums/integer_average.h"
#include "device/peer_kernels.h"

namespace multiring {
namespace {

/// Of smaller allocations the driver gives other processes all that lies beside them.
constexpr std::size_t kMinBuffer = std::size_t{2} << 20;
/// Larger arrays pass through it in segments.
constexpr std::size_t kMaxBuffer = std::size_t{64} << 20;
/// How long a device that has work of a failed operation is waited for.
constexpr double kEndSeconds = 5;

std::size_t buffer_bytes(std::size_t bytes) {
  return std::clamp(std::bit_ceil(bytes), kMinBuffer, kMaxBuffer);
}

}  // namespace

PeerMemory::PeerMemory() = default;
PeerMemory::~PeerMemory() = default;

bool PeerMemory::serves(const Operation& operation, int ranks) const {
  const cuda::Driver& driver = operation.on_devices->devices->driver();
  const bool reduces = traits_of(operation.descriptor).reduces;
  if (reduces && (ranks > peer::kMaxRanks || averages_integers(operation.descriptor))) return false;
  const std::string why = reduces ? peer::why_no_kernels(driver) : peer::why_no_peers(driver);
  static std::once_flag told;  // of the process
  if (!why.empty()) std::call_once(told, [&] { tell(why, reduces); });
  return why.empty();
}

std::string PeerMemory::make(RoundExchange& exchange, const OperationCall& call, const Operation& operation,
                             std::size_t bytes, std::unique_ptr<PeerBuffers>& buffers) {
  auto made =
      std::make_unique<PeerBuffers>(operation.on_devices->devices, operation.descriptor.offered_device);
  const std::string refusal = made->set_up(exchange, call, bytes);
  if (!refusal.empty()) return refusal;
  if (buffers != nullptr) {
    made->kernels = buffers->kernels;
    // To close them may take as long as all that their device has been given.
    outgrown_.push_back(std::move(buffers));
  }
  buffers = std::move(made);
  return "";
}

bool PeerMemory::prepare(RoundExchange& exchange, const OperationCall& call, const Operation& operation) {
  agreed_ = nullptr;
  const auto [found, is_new] = made_.try_emplace(exchange.board().each(&Descriptor::offered_device));
  std::unique_ptr<PeerBuffers>& buffers = found->second;
  if (!is_new && buffers == nullptr) return false;
  // Ranks may have different numbers of rows.
  const std::size_t wanted = buffer_bytes(exchange.agreement().most(&Descriptor::bytes));
  const int dtype = static_cast<int>(operation.dtype());
  const bool reduces = traits_of(operation.descriptor).reduces;
  const bool grows = is_new || (buffers->bytes < wanted && !buffers->is_largest);
  // What allocates, maps and loads may wait for all that the device does, and could not be ended.
  if (grows || (reduces && !buffers->kernels.contains(dtype)))
    await_part(operation, Staging::kAll, exchange, call);
  std::string refusal;
  if (is_new) refusal = make(exchange, call, operation, kMinBuffer, buffers);
  if (grows && refusal.empty() && buffers->bytes < wanted)
    // Without larger ones arrays pass through these in segments.
    buffers->is_largest = !make(exchange, call, operation, wanted, buffers).empty();
  if (reduces && refusal.empty() && !buffers->kernels.contains(dtype))
    refusal = buffers->compile(exchange, call, operation.dtype());
  if (exchange.rank() == 0 && !refusal.empty()) tell(refusal, buffers != nullptr);
  if (buffers != nullptr && (!reduces || buffers->kernels[dtype] != nullptr)) agreed_ = buffers.get();
  return agreed_ != nullptr;
}

void PeerMemory::tell(const std::string& refusal, bool of_kernels) const {
  if (warn_)
    warn_(std::string(of_kernels ? "reductions of arrays" : "arrays") +
          " on devices pass through the host, and not through peer memory: " + refusal);
}

PeerBuffers& PeerMemory::begin(const Operation& operation) {
  running_ = agreed_;
  result_ = operation.result.memory();
  return *running_;
}

void PeerMemory::end() {
  running_ = nullptr;
  result_ = nullptr;
}

void PeerMemory::end_failed() {
  std::shared_ptr<std::byte> result = std::move(result_);
  if (running_ == nullptr) return;
  PeerBuffers& failed = *std::exchange(running_, nullptr);
  // Kernels of the others may still write to this rank's buffer, which must not serve again.
  failed.is_abandoned = true;
  bool is_idle = false;
  try {
    is_idle = failed.devices->reaches_end(failed.device, failed.stream, kEndSeconds);
  } catch (const DeviceError&) {  // what has failed before is told
  }
  // To free it would wait for the device.
  if (!is_idle && result != nullptr) new std::shared_ptr<std::byte>(std::move(result));
}

void PeerMemory::release() {
  made_.clear();
  outgrown_.clear();
}

}  // namespace multiring
