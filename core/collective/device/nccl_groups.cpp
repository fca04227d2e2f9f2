#include "collective/device/nccl_groups.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "collective/device/device_arrays.h"
#include "collective/device/device_offers.h"
#include "collective/kinds.h"

namespace multiring {
namespace {

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

/// Aborts, and returns when the program's arrays are its own again: when the stream has got to its end. A
/// device that does not get there has failed. False: it may not have.
bool abort(nccl::Communicator& comm) {
  try {
    return comm.abort(nccl::kAbortSeconds) &&
           comm.devices().reaches_end(comm.device(), comm.stream(), nccl::kAbortSeconds);
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

bool NcclGroups::prepare(Exchange& exchange, const OperationCall& call, const Operation& operation) {
  // From here on an error of this rank has to end what the others begin.
  running_ = agreed_ = find(exchange, call, operation);
  return agreed_ != nullptr;
}

nccl::Communicator* NcclGroups::find(Exchange& exchange, const OperationCall& call,
                                     const Operation& operation) {
  std::vector<int> devices = offered_devices(exchange);
  if (const auto found = made_.find(devices); found != made_.end()) return found->second.get();

  std::string why;
  const nccl::Library& library = *nccl::Library::find(&why);
  const std::shared_ptr<Devices>& driven = operation.on_devices->devices;
  const int device = operation.descriptor.offered_device;
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
