#include "collective/nccl_allreduce.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "collective/device_arrays.h"

namespace multiring {
namespace {

constexpr int kMaxDevices = 64;
/// Of smaller arrays no rank looks for offers: they may be fused, or are added sooner than headers are read.
constexpr std::size_t kMinBytes = std::size_t{64} << 10;

/// What a rank tells of its NCCL, through staging memory.
struct Offer {
  int version = 0;                ///< 0: it cannot be used after all
  bool shares_devices = false;    ///< the user lets several ranks use one device
  std::array<char, 16> device{};  ///< which it is, whatever number it has in this process
  nccl::UniqueId id;              ///< of rank 0
};

bool lets_ranks_share_a_device() {
  const char* const set = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return set != nullptr && std::string_view(set) == "1";
}

Offer offer_of(const Devices& devices, const nccl::Library& library, int device, bool makes_id) {
  Offer offer;
  cuda::Device handle = 0;
  const cuda::Driver& driver = devices.driver();
  driver.check(driver.device_get(&handle, device), cuda::on("cuDeviceGet", device));
  driver.check(driver.device_uuid(offer.device.data(), handle), cuda::on("cuDeviceGetUuid", device));
  offer.shares_devices = lets_ranks_share_a_device();
  if (!makes_id || library.unique_id(&offer.id) == nccl::kSuccess) offer.version = library.version;
  return offer;
}

/// All ranks decide alike from the same offers.
bool can_serve(const std::vector<Offer>& offers) {
  std::set<std::array<char, 16>> devices;
  bool shares = true;
  for (const Offer& each : offers) {
    if (each.version == 0 || each.version != offers[0].version) return false;
    devices.insert(each.device);
    shares = shares && each.shares_devices && each.version >= nccl::kSharedDevices;
  }
  return shares || devices.size() == offers.size();
}

/// Aborts, and returns when the program's arrays are its own again: when the stream has got to its end. A
/// device that does not get there has failed.
void abort(nccl::Communicator& comm) {
  constexpr std::chrono::milliseconds kPause(1);
  Devices& devices = comm.devices();
  try {
    if (!comm.abort(nccl::kAbortSeconds)) return;
    const Devices::Current current(devices, comm.device());
    const cuda::Event end = devices.take_event(comm.device());
    if (devices.driver().event_record(end, comm.stream()) != cuda::kSuccess) return;
    const Deadline deadline = Deadline::after(nccl::kAbortSeconds);
    while (devices.driver().event_query(end) == cuda::kNotReady) {
      if (deadline.expired()) return;  // the event stays in use
      std::this_thread::sleep_for(kPause);
    }
    devices.release_event(comm.device(), end);
  } catch (const DeviceError&) {  // what has failed before is told
  }
}

void await_event(nccl::Communicator& comm, cuda::Event event, const Exchange& exchange,
                 const OperationCall& call) {
  Devices& devices = comm.devices();
  const auto is_done = [&] {
    const Devices::Current current(devices, comm.device());
    const cuda::Result result = devices.driver().event_query(event);
    if (result != cuda::kNotReady) {
      devices.driver().check(result, cuda::on("the allreduce by NCCL", comm.device()));
      return true;
    }
    comm.is_ready();  // raises what has failed
    return false;
  };
  poll(exchange, call, is_done, "the other ranks in an allreduce by NCCL. Is one of them stopped?");
}

}  // namespace

bool any_offers_nccl(const Exchange& exchange) {
  if (exchange.descriptor(exchange.rank()).bytes < kMinBytes) return false;
  for (int rank = 0; rank < exchange.size(); ++rank)
    if (exchange.descriptor(rank).nccl_device >= 0) return true;
  return false;
}

bool all_offer_nccl(const Exchange& exchange) {
  for (int rank = 0; rank < exchange.size(); ++rank)
    if (exchange.descriptor(rank).nccl_device < 0) return false;
  return true;
}

int NcclGroups::device_of(const Operation& operation, const Exchange& exchange, std::size_t min_bytes) const {
  const DeviceArrays* const arrays = operation.on_devices.get();
  const Descriptor& descriptor = operation.descriptor;
  if (arrays == nullptr || !arrays->any_order || descriptor.key.kind != OpKind::kAllreduce) return -1;
  const bool lies_on_one = arrays->input.kind == MemoryKind::kDevice &&
                           arrays->output.kind == MemoryKind::kDevice &&
                           arrays->input.device == arrays->output.device && operation.pieces.empty();
  const int device = arrays->input.device;
  if (!lies_on_one || device < 0 || device >= kMaxDevices) return -1;
  if (exchange.size() == 1 || !exchange.transport().shares_memory() ||
      exchange.transport().staging_bytes() < sizeof(Offer))
    return -1;
  if (descriptor.bytes < std::max(min_bytes, kMinBytes) || is_rounded(descriptor.key.comm_dtype) ||
      !nccl::dtype_code(descriptor.dtype) || !nccl::op_code(operation.reduction(), descriptor.dtype))
    return -1;
  if ((refused_.load(std::memory_order_relaxed) >> device & 1U) != 0) return -1;
  std::string why;
  return nccl::Library::find(&why) != nullptr ? device : -1;
}

nccl::Communicator* NcclGroups::find(Exchange& exchange, const OperationCall& call,
                                     const Operation& operation) {
  const auto size = static_cast<std::size_t>(exchange.size());
  std::vector<int> devices;
  for (int rank = 0; rank < exchange.size(); ++rank) devices.push_back(exchange.descriptor(rank).nccl_device);
  if (const auto found = made_.find(devices); found != made_.end()) return found->second.get();

  std::string why;
  const nccl::Library& library = *nccl::Library::find(&why);
  const int device = operation.descriptor.nccl_device;
  const Offer mine = offer_of(*operation.on_devices->devices, library, device, exchange.rank() == 0);
  exchange.next(call, [&] {
    std::memcpy(exchange.staging(exchange.rank()), &mine, sizeof mine);
    exchange.staged(sizeof mine);
  });
  std::vector<Offer> offers(size);
  for (int rank = 0; rank < exchange.size(); ++rank)
    std::memcpy(static_cast<void*>(&offers[static_cast<std::size_t>(rank)]), exchange.staging(rank),
                sizeof(Offer));
  std::unique_ptr<nccl::Communicator>& made = made_[std::move(devices)];
  if (can_serve(offers)) {
    made = std::make_unique<nccl::Communicator>(library, operation.on_devices->devices, device);
    running_ = made.get();
    made->connect(exchange.size(), exchange.rank(), offers[0].id);
    poll(
        exchange, call, [&] { return made->is_ready(); },
        "NCCL to connect the ranks. NCCL_DEBUG=INFO shows how far it is; MULTIRING_MODE=staged does without "
        "it.");
    running_ = nullptr;
  } else {
    refused_.fetch_or(std::uint64_t{1} << device, std::memory_order_relaxed);
  }
  return made.get();
}

void NcclGroups::end_failed() {
  if (running_ != nullptr) abort(*std::exchange(running_, nullptr));
}

bool NcclGroups::allreduce(Exchange& exchange, const OperationCall& call, Operation& operation) {
  nccl::Communicator* const comm = find(exchange, call, operation);
  if (comm == nullptr) return false;
  const DeviceArrays& arrays = *operation.on_devices;
  Devices& devices = comm->devices();
  running_ = comm;
  comm->allreduce(arrays.input.address, arrays.output.address, operation.descriptor.key.count,
                  *nccl::dtype_code(operation.dtype()),
                  *nccl::op_code(operation.reduction(), operation.dtype()));
  poll(exchange, call, [&] { return comm->is_ready(); }, "NCCL to begin an allreduce.");
  cuda::Event done = nullptr;
  {
    const Devices::Current current(devices, comm->device());
    done = devices.take_event(comm->device());
    devices.driver().check(devices.driver().event_record(done, comm->stream()),
                           cuda::on("cuEventRecord", comm->device()));
  }
  await_event(*comm, done, exchange, call);
  devices.release_event(comm->device(), done);
  // A rank may abort its part from here on, which others might still read from.
  exchange.next(call, [] {});
  running_ = nullptr;
  return true;
}

}  // namespace multiring
