#include "engine/operation_runner.h"

#include <algorithm>

#include "base/text.h"
#include "collective/device/device_arrays.h"
#include "collective/kinds.h"
#include "collective/rank_list.h"

namespace multiring {

OperationRunner::Call::Call(const OperationRunner& runner, const Descriptor& descriptor,
                            const CallOptions& options)
    : OperationCall{descriptor, {}} {
  waiting.deadline = Deadline::from_first_use(options.timeout >= 0 ? options.timeout : runner.timeout());
  waiting.interrupt = options.interrupt;
  waiting.cancelled = &runner.cancelled_;
  const CommunicatorOptions& settings = runner.options_;
  if (!settings.warn || settings.stall_warning <= 0) return;
  stalled_ = [&runner, &descriptor](double waited) {
    const Exchange& exchange = runner.exchange_;
    if (is_first_waiting(exchange.missing(), exchange.rank()))
      runner.options_.warn(exchange.describe_wait(OperationCall{descriptor, {}}, waited));
  };
  waiting.stalled = &stalled_;
  waiting.stall_after = settings.stall_warning;
}

OperationRunner::OperationRunner(Transport& transport, const CommunicatorOptions& options)
    : options_(options),
      transport_(transport),
      exchange_(transport, options.name),
      point_to_point_(exchange_),
      symmetric_(transport.rank()),
      timeout_(options.timeout) {
  if (!options.mode.empty()) exchange_.plans().force(parse_algorithm(options.mode), transport);
  exchange_.nccl().set_scope(options.nccl, transport);
  exchange_.nccl().warn_by(options.warn);
  exchange_.peer_memory().warn_by(options.warn);
}

void OperationRunner::complete(Operation& operation) const {
  Descriptor& descriptor = operation.descriptor;
  const OpTraits& traits = traits_of(descriptor);
  descriptor.asynchronous = false;
  descriptor.key.sequence = 0;
  const bool every_rank_has_dtype = traits.compared != OpTraits::Compared::kNothing;
  descriptor.key.dtype = every_rank_has_dtype ? static_cast<std::uint8_t>(descriptor.dtype) : 0;
  if (descriptor.key.comm_dtype == CommDtype::kDefault && has_comm_dtype(descriptor))
    descriptor.key.comm_dtype = options_.comm_dtype;
  if (descriptor.key.comm_dtype == CommDtype::kFloat32 && !has_comm_dtype(descriptor))
    descriptor.key.comm_dtype = CommDtype::kDefault;
  if (descriptor.key.order == Order::kDefault && traits.reduces) descriptor.key.order = options_.order;
  descriptor.offered_device = -1;
  descriptor.held_back = false;
  if (operation.on_devices != nullptr) operation.on_devices->stays = false;
  if (descriptor.key.order == Order::kCanonical && !traits.reduces) descriptor.key.order = Order::kDefault;
  if (descriptor.bytes >= kMinSymmetricBytes && operation.pieces.empty() && operation.strided == nullptr &&
      traits.reduces)
    symmetric_.locate_buffers(operation, transport_.shares_memory());
}

// What the program does with its arrays from here on may not count.
void OperationRunner::take_from_devices(Operation& operation) {
  if (options_.may_stay_on_devices)
    exchange_.offers().offer(operation, exchange_,
                             {options_.order, options_.peer_memory, options_.fuse_below});
  try {
    copy_from_devices(operation, exchange_.rank());
  } catch (const DeviceError& error) {
    exchange_.throw_within({operation.descriptor, {}}, error, "");
  }
}

// Every operation passes here, on any thread: tracing belongs here. `body` runs when the operations' arrays
// are contiguous in host memory; then the results are brought to where they belong.
template <class Body>
void OperationRunner::pass(const OperationCall& call, std::span<Operation* const> operations,
                           const Body& body) {
  exchange_.throw_if_aborted(call);
  const auto is_plain = [](const Operation* operation) {
    return operation->on_devices == nullptr && operation->strided == nullptr;
  };
  if (std::ranges::all_of(operations, is_plain)) return body();
  try {
    for (Operation* operation : operations) {
      if (operation->strided != nullptr) read_strided(*operation);
      decide_on_parts(*operation, exchange_, operations.size() == 1);
      await_copies(*operation, exchange_, call);
    }
    body();
    for (Operation* operation : operations) {
      copy_to_devices(*operation, exchange_.rank());
      if (operation->strided != nullptr) write_strided(*operation);
    }
  } catch (const ChoiceMismatch&) {
    throw;  // they have not run yet
  } catch (const DeviceError& error) {
    for (Operation* operation : operations) abandon_copies(*operation);
    exchange_.throw_within(call, error, "");
  } catch (...) {
    for (Operation* operation : operations) abandon_copies(*operation);
    throw;
  }
}

void OperationRunner::run(const OperationCall& call, Operation& operation) {
  const OpTraits& traits = traits_of(operation.descriptor);
  if (traits.run == nullptr)
    throw Error(ErrorKind::kInternal, "no collective: " + describe(operation.descriptor));
  Operation* const operations[] = {&operation};
  pass(call, operations, [&] { traits.run(exchange_, call, operation); });
}

void OperationRunner::run_fused(const OperationCall& call, std::span<Operation* const> operations) {
  pass(call, operations, [&] { fused_allreduce(exchange_, call, operations); });
}

template <class ForWhat>
void OperationRunner::warn_of_wait(Call& call, const CallOptions& options, const ForWhat& for_what) const {
  if (options.timeout > timeout()) call.waiting.stalled = nullptr;  // who says so expects to wait
  if (call.waiting.stalled == nullptr) return;
  call.stalled_ = [this, &call, for_what](double waited) {
    options_.warn(exchange_.where(call) + ", has waited " + seconds_text(waited) + " for " + for_what() +
                  kHowToSilence);
  };
}

void OperationRunner::run_message(Operation& operation, std::int64_t tag, const CallOptions& options,
                                  bool sends) {
  Call call(*this, operation.descriptor, options);
  warn_of_wait(call, options, [this, &peer = operation.descriptor.key.root, sends] {
    const std::string mutual_send = sends ? point_to_point_.describe_mutual_send(peer) : std::string();
    return exchange_.name_of(peer) + " on " + transport_.host(peer) + " (process " +
           std::to_string(transport_.process_id(peer)) + ")" +
           (mutual_send.empty() ? "" : ". " + mutual_send);
  });
  Operation* const operations[] = {&operation};
  pass(call, operations, [&] {
    if (sends)
      point_to_point_.send(call, operation, tag);
    else
      point_to_point_.receive(call, operation, tag);
  });
}

std::optional<MessageInfo> OperationRunner::probe(const Descriptor& descriptor, const ProbeRequest& request,
                                                  const CallOptions& options) {
  Call call(*this, descriptor, options);
  warn_of_wait(call, options, [&] { return "a message of " + rank_list(request.sources, transport_); });
  exchange_.throw_if_aborted(call);
  return point_to_point_.probe(call, request);
}

void OperationRunner::end_failed() {
  exchange_.nccl().end_failed();
  exchange_.peer_memory().end_failed();
}

void OperationRunner::release() {
  exchange_.nccl().release();
  exchange_.peer_memory().release();
}

}  // namespace multiring
