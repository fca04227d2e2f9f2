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
#include "collective/plan/plan_cache.h"

namespace multiring {
namespace {

/// What a rank tells of its NCCL, through staging memory.
struct Offer {
  int version = 0;
  bool is_rccl = false;           ///< whose versions have the same numbers
  bool shares_devices = false;    ///< the user lets several ranks use one device
  bool has_comm_id = false;       ///< NCCL_COMM_ID is set
  std::array<char, 16> device{};  ///< which it is, whatever number it has in this process
  int host = 0;                   ///< where that is known within one host only
};

/// What the first of the ranks that have a communicator makes for all of them when they go together: it keeps
/// a socket open as long as the process lives.
struct Meeting {
  nccl::Result made = nccl::kSuccess;
  nccl::UniqueId id;
};

bool lets_ranks_share_a_device() {
  const char* const set = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return set != nullptr && std::string_view(set) == "1";
}

Offer offer_of(const Devices& devices, const nccl::Library& library, int device, int host) {
  Offer offer;
  cuda::Device handle = 0;
  const cuda::Driver& driver = devices.driver();
  driver.check(driver.device_get(&handle, device), cuda::on("cuDeviceGet", device));
  offer.is_rccl = driver.is_hip;
  if (driver.is_hip) {  // "0000:03:00.0", of a host
    const int size = static_cast<int>(offer.device.size());
    driver.check(driver.device_pci_id(offer.device.data(), size, handle),
                 cuda::on("cuDeviceGetPCIBusId", device));
    offer.host = host;
  } else {
    driver.check(driver.device_uuid(offer.device.data(), handle), cuda::on("cuDeviceGetUuid", device));
  }
  offer.shares_devices = lets_ranks_share_a_device();
  offer.has_comm_id = std::getenv("NCCL_COMM_ID") != nullptr;
  offer.version = library.version;
  return offer;
}

/// Why NCCL cannot serve these devices together; empty: it can. All ranks decide alike from the same offers.
std::string refusal_of(const std::vector<Offer>& offers, const RoundExchange& exchange) {
  const auto name = [&](std::size_t rank) { return exchange.name_of(static_cast<int>(rank)); };
  std::map<std::pair<int, std::array<char, 16>>, std::size_t> first;  // ranks that have the devices
  std::string sharing;
  bool may_share = true;
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    const Offer& each = offers[rank];
    if (each.is_rccl != offers[0].is_rccl)
      return name(0) + " and " + name(rank) + " have devices of different makers";
    if (each.version != offers[0].version)
      return name(0) + " has NCCL " + nccl::version_text(offers[0].version) + ", " + name(rank) + " has " +
             nccl::version_text(each.version);
    if (each.has_comm_id)
      return name(rank) +
             " has NCCL_COMM_ID set, and all of NCCL's communicators would meet at that one address (unset "
             "it; NCCL_SOCKET_IFNAME names the network)";
    may_share = may_share && each.shares_devices && each.version >= nccl::kSharedDevices;
    const auto [before, is_new] = first.try_emplace({each.host, each.device}, rank);
    if (!is_new) sharing = name(before->second) + " and " + name(rank) + " have theirs on one device";
  }
  return may_share ? "" : sharing;
}

/// Aborts, and returns when the program's arrays are its own again. False: they may not be.
bool abort(nccl::Communicator& comm) {
  try {
    return comm.abort(nccl::kAbortSeconds);
  } catch (const DeviceError&) {  // what has failed before is told
    return false;
  }
}

void await_event(nccl::Communicator& comm, cuda::Event event, const RoundExchange& exchange,
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

void NcclGroups::set_scope(NcclScope scope, const Transport& transport) {
  scope_ = scope;
  const Cluster cluster = cluster_of(transport);
  has_regular_hosts_ = cluster.regular() && cluster.hosts.front().ranks.size() > 1;
}

bool NcclGroups::is_hierarchical(const RoundExchange& exchange) const {
  return scope_ == NcclScope::kHierarchical && !exchange.transport().shares_memory();
}

bool NcclGroups::serves(const RoundExchange& exchange, OpKind kind) const {
  const Transport& transport = exchange.transport();
  if (transport.shares_memory()) return scope_ != NcclScope::kOff;
  if (is_hierarchical(exchange)) return kind == OpKind::kAllreduce && has_regular_hosts_;
  return scope_ == NcclScope::kAll && transport.fully_linked();
}

/// Those that this rank has a communicator with, and itself, ascending.
std::vector<int> NcclGroups::members_of(const RoundExchange& exchange) const {
  const Transport& transport = exchange.transport();
  std::vector<int> members;
  for (int rank = 0; rank < exchange.size(); ++rank)
    if (!is_hierarchical(exchange) || transport.host_number(rank) == transport.host_number(exchange.rank()))
      members.push_back(rank);
  return members;
}

bool NcclGroups::prepare(RoundExchange& exchange, const OperationCall& call, const Operation& operation) {
  // From here on an error of this rank has to end what the others begin.
  running_ = find(exchange, call, operation);
  return running_ != nullptr;
}

nccl::Communicator* NcclGroups::find(RoundExchange& exchange, const OperationCall& call,
                                     const Operation& operation) {
  std::vector<std::int8_t> devices = exchange.board().each(&Descriptor::offered_device);
  if (const auto found = made_.find(devices); found != made_.end()) return found->second.get();

  // What connects may wait for all that the device does, and could not be ended.
  await_part(operation, Staging::kAll, exchange, call);
  std::string why;
  const nccl::Library& library = *nccl::Library::find(&why);
  const std::shared_ptr<Devices>& driven = operation.on_devices->devices;
  const int device = operation.descriptor.offered_device;
  const std::vector<Offer> offers = exchanged(
      exchange, call, offer_of(*driven, library, device, exchange.transport().host_number(exchange.rank())));
  std::unique_ptr<nccl::Communicator>& made = made_[std::move(devices)];
  if (const std::string refusal = refusal_of(offers, exchange); !refusal.empty())
    return tell(exchange, refusal), nullptr;
  const std::vector<int> members = members_of(exchange);
  Meeting mine;
  if (exchange.rank() == members.front()) mine.made = library.unique_id(&mine.id);
  const std::vector<Meeting> meetings = exchanged(exchange, call, mine);
  for (int rank = 0; rank < exchange.size(); ++rank)
    if (const nccl::Result result = meetings[static_cast<std::size_t>(rank)].made; result != nccl::kSuccess)
      return tell(exchange, "ncclGetUniqueId on " + exchange.name_of(rank) + " failed (" +
                                std::to_string(result) + ")"),
             nullptr;
  made = std::make_unique<nccl::Communicator>(library, driven, device);
  running_ = made.get();
  made->connect(static_cast<int>(members.size()),
                static_cast<int>(std::ranges::find(members, exchange.rank()) - members.begin()),
                meetings[static_cast<std::size_t>(members.front())].id);
  poll(
      exchange, call, [&] { return made->is_ready(); },
      "NCCL to connect the ranks. NCCL_DEBUG=INFO shows how far it is, NCCL_SOCKET_IFNAME names the network "
      "between hosts; MULTIRING_NCCL=off does without it.");
  return made.get();
}

void NcclGroups::tell(const RoundExchange& exchange, const std::string& refusal) const {
  if (warn_ && exchange.rank() == 0)
    warn_("arrays on devices pass through the host, and not by NCCL: " + refusal);
}

void NcclGroups::end_failed() {
  std::vector<std::shared_ptr<std::byte>> used = std::exchange(used_, {});
  if (running_ == nullptr || abort(*std::exchange(running_, nullptr))) return;
  // Others may still write to it; and to free it would wait for the device.
  for (std::shared_ptr<std::byte>& memory : used)
    if (memory != nullptr) new std::shared_ptr<std::byte>(std::move(memory));
}

void NcclGroups::run(RoundExchange& exchange, const OperationCall& call, Operation& operation,
                     std::span<const nccl::Call> calls, const std::function<void()>& meanwhile) {
  keep(operation.result.memory());
  begin(exchange, call, operation, calls);
  meanwhile();
  await_inputs(exchange, call, operation);
  await(exchange, call);
  finish(exchange, call);
}

void NcclGroups::begin(const RoundExchange& exchange, const OperationCall& call, const Operation& operation,
                       std::span<const nccl::Call> calls) {
  nccl::Communicator& comm = *running_;
  const OpTraits& traits = traits_of(operation.descriptor);
  // Copies that have not been needed read the arrays as long as they run.
  operation.on_devices->staging->order_before(comm.device(), comm.stream());
  if (traits.reduces)
    comm.begin(calls, *nccl::dtype_code(operation.dtype()),
               *nccl::op_code(operation.reduction(), operation.dtype()));
  else
    comm.begin(calls, nccl::kBytes, 0);
  const auto is_ready = [&] {
    operation.on_devices->staging->arrived();  // raises what the program's own kernels have failed by
    return comm.is_ready();
  };
  poll(exchange, call, is_ready, std::string("NCCL to begin its ") + traits.name + ".");
}

void NcclGroups::await_inputs(RoundExchange& exchange, const OperationCall& call,
                              const Operation& operation) {
  await_part(operation, Staging::kAll, exchange, call);
  exchange.next(call, [] {});
}

void NcclGroups::await(const RoundExchange& exchange, const OperationCall& call) {
  nccl::Communicator& comm = *running_;
  Devices& devices = comm.devices();
  cuda::Event done = nullptr;
  {
    const Devices::Current current(devices, comm.device());
    done = devices.take_event(comm.device());
    devices.driver().check(devices.driver().event_record(done, comm.stream()),
                           cuda::on("cuEventRecord", comm.device()));
  }
  await_event(comm, done, exchange, call);
  devices.release_event(comm.device(), done);
}

void NcclGroups::finish(RoundExchange& exchange, const OperationCall& call) {
  // A rank may abort its part from here on, which others might still read from.
  exchange.next(call, [] {});
  running_ = nullptr;
  used_.clear();
}

}  // namespace multiring
