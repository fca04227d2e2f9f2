#include "engine/communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "collective/device/device_arrays.h"
#include "collective/kinds.h"
#include "engine/communicator_list.h"
#include "engine/operation_lock.h"
#include "engine/validate.h"
#include "topology/dimensions.h"

namespace multiring {
namespace {

CommunicatorOptions completed(CommunicatorOptions options) {
  options.may_stay_on_devices = options.may_stay_on_devices && options.mode.empty();
  if (options.world == nullptr) options.world = std::make_shared<const char>('\0');
  return options;
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Transport> transport, CommunicatorOptions options)
    : options_(completed(std::move(options))),
      transport_(std::move(transport)),
      exchange_(*transport_, options_.name),
      point_to_point_(exchange_),
      symmetric_(transport_->rank()),
      timeout_(options_.timeout),
      tuning_(options_.tuning) {
  if (!options_.mode.empty()) exchange_.plans().force(parse_algorithm(options_.mode), *transport_);
  exchange_.nccl().set_scope(options_.nccl, *transport_);
  exchange_.nccl().warn_by(options_.warn);
  exchange_.peer_memory().warn_by(options_.warn);
  if (!options_.tuning.empty()) follow_tuning();
  if (rank() == 0 && options_.warn && name() == CommunicatorOptions().name) {  // others have its settings
    warn_of_rings();
    warn_of_nccl();
  }
  exchange_.set_elsewhere(
      {.waits =
           [this](int peer) { return CommunicatorList::find_other_wait(this, transport_->world_rank(peer)); },
       .was_ended =
           [this](int peer) {
             return CommunicatorList::find_other_end(this, transport_->world_rank(peer));
           }});
  CommunicatorList::add(this);
}

std::string Communicator::wait_on_this_rank(int world_rank) const {
  if (closing_.load(std::memory_order_acquire)) return "";
  for (int peer = 0; peer < size(); ++peer)
    if (transport_->world_rank(peer) == world_rank && transport_->is_ahead(peer))
      return describe_wait_of(peer);
  return "";
}

void Communicator::set_tuning(const std::string& tuning) {
  Tuning parsed = Tuning::parse(tuning);
  throw_if_abandoned();
  const std::lock_guard lock(mutex_);
  throw_if_unusable();
  if (busy_ || !queue_.empty())
    throw Error(ErrorKind::kUsage,
                "communicator '" + name() + "' cannot be tuned while operations are in progress");
  exchange_.plans().set_tuning(std::move(parsed), *transport_);
  tuning_ = tuning;
}

std::vector<AlgorithmRow> Communicator::algorithm_rows(Collective collective, std::size_t bytes,
                                                       Order order) const {
  PlanCache plans;  // operations may be using the other one
  if (!options_.mode.empty()) plans.force(parse_algorithm(options_.mode), *transport_);
  plans.set_tuning(Tuning::parse(tuning()), *transport_);
  return plans.rows(*transport_, collective, bytes, order == Order::kDefault ? options_.order : order);
}

std::string Communicator::fit_costs(std::span<const AllreduceProbe> probes) const {
  return "costs " + format_costs(exchange_.plans().fit(probes, *transport_));
}

void Communicator::run(Operation& operation, const CallOptions& options) {
  throw_if_abandoned();
  complete(operation);
  validate(operation, rank(), size(), name());
  if (operation.on_devices != nullptr) {
    await_queued(last_conflict(operation), options);
    take_from_devices(operation);
  }
  const OperationLock operation_lock(*this, operation, options);
  execute(operation, operation_lock.options());
}

// Returns when all asynchronous operations submitted before are done; those have deadlines of their own, the
// call's counts only if one was given. After a timeout the peers would wait for an operation that this rank
// skips, so it is an error like one in the middle of the operation.
CallOptions Communicator::lock_operations(const Operation& operation, const CallOptions& options) {
  const Deadline deadline = options.timeout >= 0 ? Deadline::after(options.timeout) : Deadline::never();
  std::unique_lock lock(mutex_);
  while (busy_ || !queue_.empty()) {
    throw_if_unusable();
    if (busy_ && busy_thread_ == std::this_thread::get_id())
      throw_usage(operation,
                  "called from a signal handler that interrupts another operation of '" + name() + "'");
    changed_.wait_for(lock, std::min(kTick, std::chrono::duration<double>(deadline.remaining())));
    if (!busy_ && queue_.empty()) break;
    std::shared_ptr<Work> before = queue_.empty() ? nullptr : queue_.front();
    lock.unlock();
    try {
      if (options.interrupt != nullptr && *options.interrupt) (*options.interrupt)();
      if (deadline.expired()) throw_lock_timeout(operation, before.get(), deadline);
    } catch (...) {
      fail_and_raise(operation.descriptor);
    }
    before.reset();  // without the lock: the last reference may free objects that take other locks
    lock.lock();
  }
  throw_if_unusable();
  hold_exchange();
  return {options.timeout >= 0 ? deadline.remaining() : options.timeout, options.interrupt};
}

void Communicator::throw_lock_timeout(const Operation& operation, const Work* before,
                                      const Deadline& deadline) const {
  ErrorContext context;
  context.rank = rank();
  context.host = host();
  context.operation = traits_of(operation.descriptor).name;
  context.tensor = operation.descriptor.name_view();
  context.bytes = static_cast<std::int64_t>(operation.descriptor.bytes);
  context.elapsed = deadline.elapsed();
  std::string what = "an operation of another thread";
  if (before != nullptr) {  // its kind and name only: the rest may change while it runs
    const Descriptor& first = before->operation().descriptor;
    what = std::string("what was submitted before it, first ") + traits_of(first).name + " '" +
           std::string(first.name_view()) + "'";
  }
  throw Error(ErrorKind::kTimeout,
              "rank " + std::to_string(rank()) + " on " + host() + ", in " + describe(operation.descriptor) +
                  " of communicator '" + name() + "', waited " + std::to_string(deadline.elapsed()) +
                  " s for " + what +
                  ", which is not complete. Have all ranks submitted it? MULTIRING_TIMEOUT or the timeout "
                  "argument set how long to wait.",
              context);
}

void Communicator::execute(Operation& operation, const CallOptions& options) {
  std::function<void(double)> stalled;
  const OperationCall call = make_call(operation.descriptor, options, stalled);
  try {
    exchange_.throw_if_aborted(call);
    dispatch(call, operation);
  } catch (...) {
    fail_operation(operation.descriptor);
    error_seen_->store(true, std::memory_order_relaxed);
    throw;
  }
}

// Before an operation waits for others: what the program does with its arrays from here on may not count.
void Communicator::take_from_devices(Operation& operation) {
  if (options_.may_stay_on_devices)
    exchange_.offers().offer(operation, exchange_,
                             {options_.order, options_.peer_memory, options_.fuse_below});
  try {
    copy_from_devices(operation, rank());
  } catch (const DeviceError& error) {
    try {
      exchange_.throw_within({operation.descriptor, {}}, error, "");
    } catch (const Error& named) {
      if (named.kind() == ErrorKind::kUsage) throw;
      fail_and_raise(operation.descriptor);
    }
  }
}

/// Runs `body` when the operations' arrays are contiguous in host memory, and brings the results to where
/// they belong.
template <class Body>
void Communicator::run_on_host(const OperationCall& call, std::span<Operation* const> operations,
                               const Body& body) {
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
      copy_to_devices(*operation, rank());
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

// Every collective passes here, or in the next function, on any thread: tracing belongs here.
void Communicator::dispatch(const OperationCall& call, Operation& operation) {
  const OpTraits& traits = traits_of(operation.descriptor);
  if (traits.run == nullptr)
    throw Error(ErrorKind::kInternal, "no collective: " + describe(operation.descriptor));
  Operation* const operations[] = {&operation};
  run_on_host(call, operations, [&] { traits.run(exchange_, call, operation); });
}

void Communicator::dispatch_fused(const OperationCall& call, std::span<Operation* const> operations) {
  run_on_host(call, operations, [&] { fused_allreduce(exchange_, call, operations); });
}

OperationCall Communicator::make_call(const Descriptor& descriptor, const CallOptions& options,
                                      std::function<void(double)>& stalled) {
  OperationCall call{descriptor, {}};
  call.waiting.deadline = Deadline::from_first_use(options.timeout >= 0 ? options.timeout : timeout());
  call.waiting.interrupt = options.interrupt;
  call.waiting.cancelled = &closing_;
  if (options_.warn && options_.stall_warning > 0) {
    stalled = [this, &descriptor](double waited) {
      if (is_first_waiting(exchange_.missing(), rank()))
        options_.warn(exchange_.describe_wait(OperationCall{descriptor, {}}, waited));
    };
    call.waiting.stalled = &stalled;
    call.waiting.stall_after = options_.stall_warning;
  }
  return call;
}

void Communicator::complete(Operation& operation) const {
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
    symmetric_.locate_buffers(operation, transport_->shares_memory());
}

void Communicator::prepare(Operation& operation) {
  throw_if_abandoned();
  complete(operation);
  validate(operation, rank(), size(), name());
  if (operation.on_devices != nullptr) {
    await_queued(last_conflict(operation), {});
    take_from_devices(operation);
  }
  operation.descriptor.asynchronous = true;
}

std::shared_ptr<Work> Communicator::submit(Operation operation, int priority,
                                           std::shared_ptr<void> keep_alive, double timeout) {
  prepare(operation);
  if (timeout == 0)
    throw_usage(operation, "a timeout of 0 s for an asynchronous operation: expected a number above 0");
  const QueuedWork queued{std::make_shared<Work>(std::move(operation), std::move(keep_alive), error_seen_),
                          priority, timeout};
  enqueue({&queued, 1});
  return queued.work;
}

void Communicator::enqueue(std::span<const QueuedWork> queued, bool runs_here) {
  throw_if_abandoned();
  {
    Clock::time_point now;
    const std::lock_guard lock(mutex_);
    throw_if_unusable();
    runs_here = runs_here && !busy_ && queue_.empty();
    if (runs_here)
      hold_exchange();
    else
      start_progress();
    if (queue_.empty()) memory_.clear();
    for (const auto& [work, priority, timeout] : queued) {
      work->priority_ = priority;
      work->timeout_ = timeout;
      work->index_ = work->running().descriptor.key.sequence = ++submitted_;
      work->after_ = memory_.add(work->operation(), submitted_, queue_.empty() ? submitted_ : oldest());
      work->note(&Work::Times::queued, now);
      queue_.push_back(work);
    }
  }
  if (runs_here) return run_queued();
  changed_.notify_all();
}

template <class Body>
void Communicator::run_point_to_point(Operation& operation, const CallOptions& options,
                                      std::optional<std::uint64_t> after, const Body& body) {
  throw_if_abandoned();
  validate(operation, rank(), size(), name());
  require_peer(operation, operation.descriptor.key.root);
  {
    const std::lock_guard lock(mutex_);
    throw_if_unusable();
  }
  await_queued(after.value_or(last_conflict(operation)), options);
  if (operation.on_devices != nullptr) take_from_devices(operation);
  std::function<void(double)> stalled;
  OperationCall call = make_call(operation.descriptor, options, stalled);
  if (options.timeout > timeout()) call.waiting.stalled = nullptr;  // who says so expects to wait
  stalled = [&](double waited) {
    const int peer = operation.descriptor.key.root;
    const std::string mutual_send = operation.descriptor.key.kind == OpKind::kSend
                                        ? point_to_point_.describe_mutual_send(peer)
                                        : std::string();
    options_.warn(exchange_.where(call) + ", has waited " + seconds_text(waited) + " for " +
                  exchange_.name_of(peer) + " on " + transport_->host(peer) + " (process " +
                  std::to_string(transport_->process_id(peer)) + ")" +
                  (mutual_send.empty() ? "" : ". " + mutual_send) + kHowToSilence);
  };
  try {
    exchange_.throw_if_aborted(call);
    Operation* const operations[] = {&operation};
    run_on_host(call, operations, [&] { body(call); });
  } catch (...) {
    fail_and_raise(operation.descriptor);
  }
}

void Communicator::send(Operation& operation, std::int64_t tag, const CallOptions& options,
                        std::optional<std::uint64_t> after) {
  run_point_to_point(operation, options, after,
                     [&](const OperationCall& call) { point_to_point_.send(call, operation, tag); });
}

void Communicator::receive(Operation& operation, std::int64_t tag, const CallOptions& options,
                           std::optional<std::uint64_t> after) {
  run_point_to_point(operation, options, after,
                     [&](const OperationCall& call) { point_to_point_.receive(call, operation, tag); });
}

}  // namespace multiring
