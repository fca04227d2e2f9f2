#include "collective/nccl_groups.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "collective/device_arrays.h"
#include "collective/kinds.h"

namespace multiring {
namespace {

constexpr int kMaxDevice = std::numeric_limits<std::int8_t>::max();
/// Smaller arrays of all ranks are copied sooner than NCCL begins; allreduces of them may be fused, too.
constexpr std::size_t kMinBytes = std::size_t{64} << 10;

/// What a rank tells of its NCCL, through staging memory.
struct Offer {
  int version = 0;
  bool shares_devices = false;    ///< the user lets several ranks use one device
  std::array<char, 16> device{};  ///< which it is, whatever number it has in this process
};

/// What rank 0 makes for all when they go together: it keeps a socket open as long as the process lives.
struct Meeting {
  nccl::Result made = nccl::kSuccess;
  nccl::UniqueId id;
};

bool lets_ranks_share_a_device() {
  const char* const set = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return set != nullptr && std::string_view(set) == "1";
}

Offer offer_of(const Devices& devices, const nccl::Library& library, int device) {
  Offer offer;
  cuda::Device handle = 0;
  const cuda::Driver& driver = devices.driver();
  driver.check(driver.device_get(&handle, device), cuda::on("cuDeviceGet", device));
  driver.check(driver.device_uuid(offer.device.data(), handle), cuda::on("cuDeviceGetUuid", device));
  offer.shares_devices = lets_ranks_share_a_device();
  offer.version = library.version;
  return offer;
}

/// Why NCCL cannot serve these devices together; empty: it can. All ranks decide alike from the same offers.
std::string refusal_of(const std::vector<Offer>& offers, const Exchange& exchange) {
  const auto name = [&](std::size_t rank) { return exchange.name_of(static_cast<int>(rank)); };
  std::map<std::array<char, 16>, std::size_t> first;  // ranks that have the devices
  std::string sharing;
  bool may_share = true;
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    const Offer& each = offers[rank];
    if (each.version != offers[0].version)
      return name(0) + " has NCCL " + nccl::version_text(offers[0].version) + ", " + name(rank) + " has " +
             nccl::version_text(each.version);
    may_share = may_share && each.shares_devices && each.version >= nccl::kSharedDevices;
    const auto [before, is_new] = first.try_emplace(each.device, rank);
    if (!is_new) sharing = name(before->second) + " and " + name(rank) + " have theirs on one device";
  }
  return may_share ? "" : sharing;
}

/// What each rank publishes, by rank.
template <class Value>
std::vector<Value> exchanged(Exchange& exchange, const OperationCall& call, const Value& mine) {
  exchange.next(call, [&] {
    std::memcpy(exchange.staging(exchange.rank()), &mine, sizeof mine);
    exchange.staged(sizeof mine);
  });
  std::vector<Value> all(static_cast<std::size_t>(exchange.size()));
  for (int rank = 0; rank < exchange.size(); ++rank)
    std::memcpy(static_cast<void*>(&all[static_cast<std::size_t>(rank)]), exchange.staging(rank),
                sizeof(Value));
  return all;
}

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
  if (has_output && descriptor.key.kind == OpKind::kAllgather && overlap(arrays.input, arrays.output))
    return -1;
  const Buffer both[] = {arrays.input, arrays.output};
  return device_of(std::span(both).first(has_output ? 2 : 1));
}

/// Whether NCCL has what the operation does, in an order of additions that the user allows. What moves bits
/// and adds nothing is asked of NCCL in jobs that are for any order, until it has been seen on hardware.
bool is_served(const Operation& operation, Order job) {
  const Descriptor& descriptor = operation.descriptor;
  switch (descriptor.key.kind) {
    case OpKind::kAllgather:
    case OpKind::kBroadcast:
    case OpKind::kAlltoall:
      return job == Order::kAny;
    case OpKind::kAllreduce:
    case OpKind::kReduceScatter:
      return descriptor.key.order == Order::kAny && !is_rounded(descriptor.key.comm_dtype) &&
             nccl::dtype_code(descriptor.dtype) && nccl::op_code(operation.reduction(), descriptor.dtype);
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

/// What is likely to be offered again, by its kind, name, size and device.
std::uint64_t key_of(const Descriptor& descriptor) {
  constexpr std::uint64_t kPrime = 0x100000001b3ULL;
  const std::uint64_t kind = static_cast<std::uint64_t>(descriptor.key.kind) << 8U;
  return ((descriptor.key.name_hash ^ descriptor.bytes) * kPrime + kind) * kPrime +
         static_cast<std::uint64_t>(descriptor.nccl_device);
}

/// Aborts, and returns when the program's arrays are its own again: when the stream has got to its end. A
/// device that does not get there has failed. False: it may not have.
bool abort(nccl::Communicator& comm) {
  constexpr std::chrono::milliseconds kPause(1);
  Devices& devices = comm.devices();
  try {
    if (!comm.abort(nccl::kAbortSeconds)) return false;
    const Devices::Current current(devices, comm.device());
    const cuda::Event end = devices.take_event(comm.device());
    if (devices.driver().event_record(end, comm.stream()) != cuda::kSuccess) return false;
    const Deadline deadline = Deadline::after(nccl::kAbortSeconds);
    while (devices.driver().event_query(end) == cuda::kNotReady) {
      if (deadline.expired()) return false;  // the event stays in use
      std::this_thread::sleep_for(kPause);
    }
    devices.release_event(comm.device(), end);
    return true;
  } catch (const DeviceError&) {  // what has failed before is told
    return false;
  }
}

void await_event(nccl::Communicator& comm, cuda::Event event, const Exchange& exchange,
                 const OperationCall& call) {
  Devices& devices = comm.devices();
  const auto is_done = [&] {
    const Devices::Current current(devices, comm.device());
    const cuda::Result result = devices.driver().event_query(event);
    if (result != cuda::kNotReady) {
      devices.driver().check(result, cuda::on("the operation of NCCL", comm.device()));
      return true;
    }
    comm.is_ready();  // raises what has failed
    return false;
  };
  const std::string name = traits_of(call.descriptor).name;
  poll(exchange, call, is_done, "the other ranks in NCCL's " + name + ". Is one of them stopped?");
}

}  // namespace

bool waits_for_offers(const Descriptor& descriptor) {
  return descriptor.nccl_device >= 0 && is_large(descriptor);
}

bool any_offers_nccl(const Exchange& exchange) {
  const Descriptor& mine = exchange.descriptor(exchange.rank());
  const bool all_as_large = traits_of(mine).compared == OpTraits::Compared::kElements;
  if (all_as_large && !is_large(mine)) return false;
  for (int rank = 0; rank < exchange.size(); ++rank)
    if (waits_for_offers(exchange.descriptor(rank))) return true;
  return false;
}

void NcclGroups::offer(Operation& operation, const Exchange& exchange, Order job,
                       std::size_t min_bytes) const {
  DeviceArrays& arrays = *operation.on_devices;
  Descriptor& descriptor = operation.descriptor;
  descriptor.nccl_device = -1;
  arrays.stays = false;
  if (exchange.size() == 1 || !exchange.transport().shares_memory() ||
      exchange.transport().staging_bytes() < sizeof(Meeting))
    return;
  const OpTraits& traits = traits_of(descriptor);
  const std::size_t fused = descriptor.key.kind == OpKind::kAllreduce ? min_bytes : 0;
  // Others may have more rows.
  const std::size_t least = traits.compared == OpTraits::Compared::kRow ? 1 : std::max(fused, kMinBytes);
  if (descriptor.bytes < least || !is_served(operation, job)) return;
  const int device = device_of(operation);
  std::string why;
  if (device < 0 || device > kMaxDevice || nccl::Library::find(&why) == nullptr) return;
  descriptor.nccl_device = static_cast<std::int8_t>(device);
  descriptor.nccl_division = operation.pieces.empty() ? 0 : division_of(arrays.pieces);
  const std::lock_guard lock(mutex_);
  arrays.stays = is_large(descriptor) && !not_taken_.contains(key_of(descriptor));
}

/// The same parts of their arrays. Ranks decide alike from what all have published.
bool NcclGroups::all_offer(const Exchange& exchange) {
  for (int rank = 0; rank < exchange.size(); ++rank) {
    const Descriptor& theirs = exchange.descriptor(rank);
    if (theirs.nccl_device < 0 || theirs.nccl_division != exchange.descriptor(0).nccl_division) return false;
  }
  return true;
}

bool NcclGroups::agree(Exchange& exchange, const OperationCall& call, Operation& operation) {
  agreed_ = all_offer(exchange) ? find(exchange, call, operation) : nullptr;
  if (operation.descriptor.nccl_device < 0) return false;
  note_offer(operation, agreed_ != nullptr);
  if (agreed_ == nullptr)
    copy_after_all(operation, exchange, call);
  else
    stay_on_devices(operation);
  return agreed_ != nullptr;
}

void NcclGroups::note_offer(const Operation& operation, bool is_taken) {
  constexpr std::size_t kMaxKept = 1000;
  if (!is_large(operation.descriptor)) return;  // which are copied in any case
  const std::lock_guard lock(mutex_);
  if (is_taken) {
    not_taken_.erase(key_of(operation.descriptor));
    return;
  }
  if (not_taken_.size() == kMaxKept) not_taken_.clear();  // of sizes that change with each call
  not_taken_.insert(key_of(operation.descriptor));
}

nccl::Communicator* NcclGroups::find(Exchange& exchange, const OperationCall& call,
                                     const Operation& operation) {
  std::vector<int> devices;
  for (int rank = 0; rank < exchange.size(); ++rank) devices.push_back(exchange.descriptor(rank).nccl_device);
  if (const auto found = made_.find(devices); found != made_.end()) return found->second.get();

  std::string why;
  const nccl::Library& library = *nccl::Library::find(&why);
  const std::shared_ptr<Devices>& driven = operation.on_devices->devices;
  const int device = operation.descriptor.nccl_device;
  const std::vector<Offer> offers = exchanged(exchange, call, offer_of(*driven, library, device));
  std::unique_ptr<nccl::Communicator>& made = made_[std::move(devices)];
  if (const std::string refusal = refusal_of(offers, exchange); !refusal.empty())
    return tell(exchange, refusal), nullptr;
  Meeting mine;
  if (exchange.rank() == 0) mine.made = library.unique_id(&mine.id);
  const Meeting meeting = exchanged(exchange, call, mine)[0];
  if (meeting.made != nccl::kSuccess)
    return tell(exchange, "ncclGetUniqueId on rank 0 failed (" + std::to_string(meeting.made) + ")"), nullptr;
  made = std::make_unique<nccl::Communicator>(library, driven, device);
  running_ = made.get();
  made->connect(exchange.size(), exchange.rank(), meeting.id);
  poll(
      exchange, call, [&] { return made->is_ready(); },
      "NCCL to connect the ranks. NCCL_DEBUG=INFO shows how far it is; MULTIRING_MODE=staged does without "
      "it.");
  running_ = nullptr;
  return made.get();
}

void NcclGroups::tell(const Exchange& exchange, const std::string& refusal) const {
  if (warn_ && exchange.rank() == 0)
    warn_("arrays on devices pass through the host, and not by NCCL: " + refusal);
}

void NcclGroups::end_failed() {
  std::shared_ptr<std::byte> result = std::move(result_);
  if (running_ == nullptr || abort(*std::exchange(running_, nullptr))) return;
  // Others may still write to it; and to free it would wait for the device.
  if (result != nullptr) new std::shared_ptr<std::byte>(std::move(result));
}

void NcclGroups::run(Exchange& exchange, const OperationCall& call, Operation& operation,
                     std::span<const nccl::Call> calls, const std::function<void()>& meanwhile) {
  nccl::Communicator* const comm = agreed_;
  Devices& devices = comm->devices();
  const OpTraits& traits = traits_of(operation.descriptor);
  running_ = comm;
  result_ = operation.result.memory();
  if (traits.reduces)
    comm->begin(calls, *nccl::dtype_code(operation.dtype()),
                *nccl::op_code(operation.reduction(), operation.dtype()));
  else
    comm->begin(calls, nccl::kBytes, 0);
  poll(
      exchange, call, [&] { return comm->is_ready(); },
      std::string("NCCL to begin its ") + traits.name + ".");
  cuda::Event done = nullptr;
  {
    const Devices::Current current(devices, comm->device());
    done = devices.take_event(comm->device());
    devices.driver().check(devices.driver().event_record(done, comm->stream()),
                           cuda::on("cuEventRecord", comm->device()));
  }
  meanwhile();
  await_event(*comm, done, exchange, call);
  devices.release_event(comm->device(), done);
  // Copies that have not been needed read the arrays as long as they run.
  await_part(operation, Staging::kAll, exchange, call);
  // A rank may abort its part from here on, which others might still read from.
  exchange.next(call, [] {});
  running_ = nullptr;
  result_ = nullptr;
}

}  // namespace multiring
