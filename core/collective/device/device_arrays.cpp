#include "collective/device/device_arrays.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "base/text.h"
#include "collective/device/device_offers.h"
#include "collective/kinds.h"
#include "collective/sums/integer_average.h"

namespace multiring {
namespace {

constexpr std::size_t kPieceAlignment = 64;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

bool is_broadcast(const Descriptor& descriptor) { return descriptor.key.kind == OpKind::kBroadcast; }

void stage_input(Operation& operation, DeviceArrays& arrays, int rank) {
  std::byte* const memory = arrays.staging->reserve(arrays.input);
  operation.input = memory;
  const bool is_read = !is_broadcast(operation.descriptor) || operation.descriptor.key.root == rank;
  if (is_read) arrays.staging->copy_to_host(arrays.input, memory);
}

void stage_output(Operation& operation, DeviceArrays& arrays) {
  // A result that may replace the input does so on the host only: the program's input stays.
  const OpTraits& traits = traits_of(operation.descriptor);
  const bool in_place = traits.output == OpTraits::Output::kSame &&
                        traits.overlap == OpTraits::Overlap::kWhole && arrays.input.on_device();
  if (in_place) {
    arrays.staging->order_after(arrays.output);
    operation.output = const_cast<std::byte*>(operation.input);
  } else {
    operation.output = arrays.staging->reserve(arrays.output);
  }
}

/// All in one block: there may be hundreds, and small ones.
void stage_pieces(Operation& operation, DeviceArrays& arrays) {
  Buffer whole;
  for (const Buffer& piece : arrays.pieces) {
    if (!piece.on_device()) continue;
    const std::size_t before = whole.bytes;
    whole = piece;
    whole.bytes = before + aligned(piece.bytes);
  }
  if (!whole.on_device()) return;
  std::byte* memory = arrays.staging->reserve(whole);
  for (std::size_t i = 0; i < arrays.pieces.size(); ++i) {
    const Buffer& piece = arrays.pieces[i];
    if (!piece.on_device()) continue;
    arrays.staging->copy_to_host(piece, memory);
    operation.pieces[i].input = operation.pieces[i].output = memory;
    memory += aligned(piece.bytes);
  }
}

void stage(Operation& operation, DeviceArrays& arrays, int rank) {
  if (arrays.input.on_device()) {
    stage_input(operation, arrays, rank);
    arrays.allocate_result = [devices = arrays.devices, device = arrays.input.device](Buffer& made) {
      return devices->pinned(device, made.bytes);
    };
    operation.result.allocate_by(&arrays.allocate_result);
  }
  if (arrays.output.on_device()) stage_output(operation, arrays);
  stage_pieces(operation, arrays);
  arrays.staging->start();
}

void return_result(Operation& operation, DeviceArrays& arrays) {
  Buffer there = arrays.input;
  there.bytes = operation.result.bytes();
  const std::shared_ptr<std::byte> memory = arrays.devices->device_memory(there.device, there.bytes);
  there.address = memory.get();
  there.kind = MemoryKind::kDevice;
  arrays.staging->copy_back(there, operation.result.data(), there.bytes);
  arrays.staging->finish();
  operation.result.replace(memory, there);
}

/// In parts of some size, but for the last.
void return_up_to(const Operation& operation, std::size_t end) {
  DeviceArrays& arrays = *operation.on_devices;
  if (!arrays.output.on_device()) return;
  if (end < arrays.returned + Staging::part_bytes(arrays.output.bytes) && end < arrays.output.bytes) return;
  if (end <= arrays.returned) return;
  Buffer part = arrays.output;
  part.address += arrays.returned;
  part.bytes = end - arrays.returned;
  arrays.staging->copy_back(part, operation.output + arrays.returned, part.bytes);
  arrays.returned = end;
}

}  // namespace

void copy_from_devices(Operation& operation, int rank) {
  if (operation.on_devices == nullptr) return;
  DeviceArrays& arrays = *operation.on_devices;
  arrays.staging = std::make_unique<Staging>(arrays.devices);
  if (arrays.stays) {
    for (const Buffer& array : {arrays.input, arrays.output})
      if (array.on_device()) arrays.staging->order_after(array);
    for (const Buffer& piece : arrays.pieces)
      if (piece.on_device()) arrays.staging->order_after(piece);
    return;
  }
  try {
    stage(operation, arrays, rank);
  } catch (const DeviceError& error) {
    // What NCCL may take needs no copy, for which the host may have no memory to pin.
    if (!waits_for_offers(operation.descriptor) || error.kind() == ErrorKind::kUsage) throw;
    arrays.stays = true;
    copy_from_devices(operation, rank);
  }
}

void copy_after_all(Operation& operation, const RoundExchange& exchange, const OperationCall& call) {
  DeviceArrays& arrays = *operation.on_devices;
  if (!arrays.stays) return;
  arrays.stays = false;
  stage(operation, arrays, exchange.rank());
  await_part(operation, Staging::kAll, exchange, call);
}

void stay_on_devices(Operation& operation) {
  DeviceArrays& arrays = *operation.on_devices;
  arrays.stays = true;
  if (!operation.pieces.empty()) return;
  operation.input = arrays.input.address;
  if (arrays.output.on_device()) operation.output = arrays.output.address;
  arrays.allocate_result = [devices = arrays.devices, device = arrays.input.device](Buffer& made) {
    made.kind = MemoryKind::kDevice;
    made.device = device;
    return devices->device_memory(device, made.bytes);
  };
  operation.result.allocate_by(&arrays.allocate_result);
}

void decide_on_parts(Operation& operation, const RoundExchange& exchange, bool alone) {
  if (operation.on_devices == nullptr) return;
  const Descriptor& descriptor = operation.descriptor;
  // What runs then is collective/staged/staged_allreduce.h, which asks.
  operation.on_devices->in_parts = alone && !operation.on_devices->stays &&
                                   descriptor.key.kind == OpKind::kAllreduce && exchange.size() > 1 &&
                                   exchange.transport().shares_memory() && operation.pieces.empty() &&
                                   descriptor.bytes >= Staging::kPartsFrom && !averages_integers(descriptor);
}

void await_copies(const Operation& operation, const RoundExchange& exchange, const OperationCall& call) {
  if (operation.on_devices == nullptr || operation.on_devices->stays) return;
  const bool in_parts = operation.on_devices->in_parts;
  await_part(operation, in_parts ? exchange.transport().staging_bytes() : Staging::kAll, exchange, call);
}

void await_part(const Operation& operation, std::size_t end, const RoundExchange& exchange,
                const OperationCall& call) {
  if (operation.on_devices == nullptr || operation.on_devices->staging->arrived(end)) return;
  Staging& staging = *operation.on_devices->staging;
  poll(
      exchange, call, [&] { return staging.arrived(end); },
      "the device to finish the work that makes the input. Does a kernel of the program never end?");
}

void poll(const RoundExchange& exchange, const OperationCall& call, const std::function<bool()>& is_done,
          const std::string& for_what, bool needs_peers) {
  const WaitOptions& waiting = call.waiting;
  constexpr double kSpin = 200e-6;  // seconds; a kernel that takes longer costs less than waking up late
  constexpr double kBetweenChecks = 0.005;
  constexpr std::chrono::microseconds kPause(20);
  waiting.deadline.start();
  // Before ranks are matched the others tell whom they wait for.
  bool is_told = waiting.stall_after <= 0 || waiting.stalled == nullptr || call.descriptor.offered_device < 0;
  double next_check = waiting.deadline.elapsed() + kBetweenChecks;
  const double spin_until = waiting.deadline.elapsed() + kSpin;
  while (!is_done()) {
    const double now = waiting.deadline.elapsed();
    if (now > spin_until) std::this_thread::sleep_for(kPause);
    if (now < next_check) continue;
    next_check = now + kBetweenChecks;
    waiting.check_interrupt();
    if (!is_told && now >= waiting.stall_after) {
      is_told = true;
      (*waiting.stalled)(now);
    }
    if (needs_peers) exchange.throw_if_aborted(call);
    // A peer that has ended would be noticed when it is waited for; by then it may be long gone.
    if (needs_peers && is_collective(call.descriptor.key.kind))
      if (const WaitResult ended = exchange.transport().find_ended(); !ended.ok())
        exchange.throw_in_progress(call, ended, ended.peer);
    if (waiting.is_cancelled()) throw DeviceError(ErrorKind::kAborted, "the communicator is closed");
    if (waiting.deadline.expired())
      throw DeviceError(ErrorKind::kTimeout,
                        "waited " + seconds_text(waiting.deadline.elapsed()) + " for " + for_what +
                            " MULTIRING_TIMEOUT or the timeout argument set how long to wait");
  }
}

void return_part(const Operation& operation, std::size_t end) {
  // Of operations that run together `end` counts the bytes of all.
  if (operation.on_devices != nullptr && operation.on_devices->in_parts) return_up_to(operation, end);
}

void copy_to_devices(Operation& operation, int rank) {
  if (operation.on_devices == nullptr) return;
  DeviceArrays& arrays = *operation.on_devices;
  if (arrays.stays) return arrays.staging.reset();
  const Descriptor& descriptor = operation.descriptor;
  const bool is_there = is_broadcast(descriptor) && descriptor.key.root == rank &&
                        arrays.input.address == arrays.output.address;
  if (!is_there) return_up_to(operation, arrays.output.bytes);
  for (std::size_t i = 0; i < arrays.pieces.size(); ++i)
    if (arrays.pieces[i].on_device())
      arrays.staging->copy_back(arrays.pieces[i], operation.pieces[i].output, arrays.pieces[i].bytes);
  arrays.staging->finish();
  if (arrays.input.on_device() && operation.result.data() != nullptr) return_result(operation, arrays);
  arrays.staging.reset();
}

void abandon_copies(Operation& operation) {
  if (operation.on_devices == nullptr || operation.on_devices->staging == nullptr) return;
  operation.on_devices->staging->hold_back();
  operation.on_devices->staging.reset();
}

}  // namespace multiring
