#include "collective/device/device_offers.h"

#include <algorithm>
#include <limits>
#include <span>
#include <string>

#include "collective/device/device_arrays.h"
#include "collective/device/nccl_groups.h"
#include "collective/device/peer_memory.h"
#include "collective/kinds.h"
#include "device/nccl.h"

namespace multiring {
namespace {

constexpr int kMaxDevice = std::numeric_limits<std::int8_t>::max();
/// Smaller arrays of all ranks are copied sooner than NCCL begins; allreduces of them may be fused, too.
constexpr std::size_t kMinBytes = std::size_t{64} << 10;

/// The device on which all of these lie; -1: on none, on several, or in memory that moves.
int device_of(std::span<const Buffer> arrays) {
  int device = -1;
  for (const Buffer& array : arrays) {
    if (!array.on_device()) continue;
    if (array.kind != MemoryKind::kDevice || (device >= 0 && array.device != device)) return -1;
    device = array.device;
  }
  return device;
}

bool overlap(const Buffer& a, const Buffer& b) {
  return a.address < b.address + b.bytes && b.address < a.address + a.bytes;
}

/// An empty input lies nowhere, so it is not on one; an empty output may be on any.
int device_of(const Operation& operation) {
  const Descriptor& descriptor = operation.descriptor;
  const DeviceArrays& arrays = *operation.on_devices;
  if (!operation.pieces.empty()) return device_of(arrays.pieces);
  if (!arrays.input.on_device() || arrays.input.bytes == 0) return -1;
  const bool has_output = operation.output != nullptr && operation.output_bytes > 0;
  if (has_output && !arrays.output.on_device()) return -1;
  // NCCL takes it where it would be in the result, which is not known where ranks have other numbers of rows.
  const bool may_overlap = traits_of(descriptor).overlap == OpTraits::Overlap::kAny;
  if (has_output && may_overlap && overlap(arrays.input, arrays.output)) return -1;
  const Buffer both[] = {arrays.input, arrays.output};
  return device_of(std::span(both).first(has_output ? 2 : 1));
}

/// Whether NCCL has what the operation does, in an order of additions that the user allows. What moves bits
/// and adds nothing is asked of NCCL in jobs that are for any order, until it has been seen on hardware.
/// `rounds`: whether comm_dtype would round what NCCL sends from host to host, which it has not.
bool nccl_has(const Operation& operation, Order job, bool rounds) {
  const Descriptor& descriptor = operation.descriptor;
  switch (descriptor.key.kind) {
    case OpKind::kAllgather:
    case OpKind::kBroadcast:
    case OpKind::kAlltoall:
    case OpKind::kGather:
      return job == Order::kAny;
    case OpKind::kAllreduce:
    case OpKind::kReduceScatter:
      return descriptor.key.order == Order::kAny && !(rounds && is_rounded(descriptor.key.comm_dtype)) &&
             nccl::dtype_code(descriptor.dtype) && nccl::op_code(operation.reduction(), descriptor.dtype);
    default:
      return false;
  }
}

/// Whether peer memory has it; what adds does so in the canonical order, also where any is allowed.
bool peers_have(const Descriptor& descriptor) {
  switch (descriptor.key.kind) {
    case OpKind::kAllgather:
    case OpKind::kBroadcast:
    case OpKind::kAlltoall:
    case OpKind::kGather:
      return true;
    case OpKind::kAllreduce:
    case OpKind::kReduceScatter:
      return !is_complex(descriptor.dtype);  // has no kernel
    default:
      return false;
  }
}

/// A hash of how many bytes lie on the host, and on the device piece by piece; never 0.
std::uint64_t division_of(std::span<const Buffer> pieces) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  const auto add = [&hash](std::uint64_t number) {
    hash = (hash ^ number) * 0x100000001b3ULL;
    hash ^= hash >> 32U;
  };
  std::uint64_t on_host = 0;
  for (const Buffer& piece : pieces) {
    if (!piece.on_device()) {
      on_host += piece.bytes;
    } else if (piece.bytes > 0) {
      add(on_host);
      add(piece.bytes);
      on_host = 0;
    }
  }
  add(on_host);
  return hash | 1U;
}

bool is_large(const Descriptor& descriptor) { return descriptor.bytes >= kMinBytes; }

/// What is likely to be offered again, by its kind, order, name, size and device.
std::uint64_t key_of(const Descriptor& descriptor, int device) {
  constexpr std::uint64_t kPrime = 0x100000001b3ULL;
  const std::uint64_t kind = static_cast<std::uint64_t>(descriptor.key.kind) << 16U |
                             static_cast<std::uint64_t>(descriptor.key.order) << 8U;
  return ((descriptor.key.name_hash ^ descriptor.bytes) * kPrime + kind) * kPrime +
         static_cast<std::uint64_t>(device);
}

}  // namespace

bool waits_for_offers(const Descriptor& descriptor) {
  return descriptor.offered_device >= 0 && is_large(descriptor);
}

bool any_offers(const RoundExchange& exchange) {
  const Descriptor& mine = exchange.board().mine();
  const bool all_as_large = traits_of(mine).compared == OpTraits::Compared::kElements;
  return !(all_as_large && !is_large(mine)) && exchange.agreement().any(waits_for_offers);
}

void DeviceOffers::offer(Operation& operation, const RoundExchange& exchange, const Wanted& wanted) const {
  DeviceArrays& arrays = *operation.on_devices;
  Descriptor& descriptor = operation.descriptor;
  descriptor.offered_device = -1;
  arrays.stays = false;
  if (exchange.size() == 1 || exchange.transport().staging_bytes() < kOfferBytes) return;
  const OpTraits& traits = traits_of(descriptor);
  const std::size_t fused = descriptor.key.kind == OpKind::kAllreduce ? wanted.min_bytes : 0;
  // Others may have more rows.
  const std::size_t least = traits.compared == OpTraits::Compared::kRow ? 1 : std::max(fused, kMinBytes);
  if (descriptor.bytes < least) return;
  const int device = device_of(operation);
  if (device < 0 || device > kMaxDevice) return;
  const bool one_host = exchange.transport().shares_memory();
  std::string why;
  const bool rounds = !one_host && !nccl_.is_hierarchical(exchange);
  const bool by_nccl = nccl_.serves(exchange, descriptor.key.kind) &&
                       nccl_has(operation, wanted.order, rounds) && nccl::Library::find(&why) != nullptr;
  const std::uint64_t key = key_of(descriptor, device);
  const bool has_peers = one_host && wanted.peer_memory && peers_have(descriptor);
  descriptor.offers_peers = has_peers && (!by_nccl || is_noted(not_by_nccl_, key)) &&
                            peer_memory_.serves(operation, exchange.size());
  if (!by_nccl && !descriptor.offers_peers) return;
  descriptor.offered_device = static_cast<std::int8_t>(device);
  descriptor.offered_division = operation.pieces.empty() ? 0 : division_of(arrays.pieces);
  arrays.stays = is_large(descriptor) && !is_noted(not_taken_, key);
}

bool DeviceOffers::is_noted(const std::set<std::uint64_t>& keys, std::uint64_t key) const {
  const std::lock_guard lock(mutex_);
  return keys.contains(key);
}

bool DeviceOffers::agree(RoundExchange& exchange, const OperationCall& call, Operation& operation) {
  const Agreement& agreement = exchange.agreement();
  bool is_agreed = false;
  // They offer to run the same parts of their arrays.
  const bool is_offered_by_all = agreement.all([](const Descriptor& each) {
    return each.offered_device >= 0;
  }) && agreement.same(&Descriptor::offered_division);
  if (is_offered_by_all && agreement.same(&Descriptor::offers_peers))
    is_agreed = operation.descriptor.offers_peers ? peer_memory_.prepare(exchange, call, operation)
                                                  : nccl_.prepare(exchange, call, operation);
  if (operation.descriptor.offered_device < 0) return false;
  note_offer(operation, is_agreed, is_offered_by_all);
  if (!is_agreed) {
    copy_after_all(operation, exchange, call);
    return false;
  }
  // To allocate a result may wait for all that the device does, and could not be ended.
  if (operation.output == nullptr && operation.pieces.empty())
    await_part(operation, Staging::kAll, exchange, call);
  stay_on_devices(operation);
  return true;
}

/// `by_all`: all have offered.
void DeviceOffers::note_offer(const Operation& operation, bool is_taken, bool by_all) {
  constexpr std::size_t kMaxKept = 1000;
  const Descriptor& descriptor = operation.descriptor;
  const std::uint64_t key = key_of(descriptor, descriptor.offered_device);
  const std::lock_guard lock(mutex_);
  const auto note = [key](std::set<std::uint64_t>& keys) {
    if (keys.size() == kMaxKept) keys.clear();  // of sizes that change with each call
    keys.insert(key);
  };
  if (!is_taken && by_all && !descriptor.offers_peers) note(not_by_nccl_);
  if (!is_large(descriptor)) return;  // which are copied in any case
  if (is_taken)
    not_taken_.erase(key);
  else
    note(not_taken_);
}

}  // namespace multiring
