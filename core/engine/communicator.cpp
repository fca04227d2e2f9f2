#include "engine/communicator.h"

#include <algorithm>
#include <utility>

#include "collective/kinds.h"
#include "engine/communicator_settings.h"
#include "engine/validate.h"

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
      first_error_("communicator '" + options_.name + "'", transport_->rank()),
      runner_(*transport_, options_),
      queue_(runner_, first_error_, [this] { return weak_from_this().lock(); }),
      tuning_(follow_tuning(runner_.exchange(), options_)) {
  if (rank() == 0 && options_.warn && name() == CommunicatorOptions().name)  // others have its settings
    warn_of_settings(runner_.exchange(), options_, tuning_);
  runner_.exchange().set_elsewhere(
      {.waits =
           [this](int peer) { return CommunicatorList::find_other_wait(this, transport_->world_rank(peer)); },
       .was_ended =
           [this](int peer) {
             return CommunicatorList::find_other_end(this, transport_->world_rank(peer));
           }});
  CommunicatorList::add(this);
}

Communicator::~Communicator() {
  CommunicatorList::remove(this);
  queue_.release_thread();
  close();
}

std::uint64_t Communicator::next_number() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

std::vector<int> Communicator::hosts() const {
  std::vector<int> numbers;
  for (int each = 0; each < size(); ++each) numbers.push_back(transport_->host_number(each));
  return numbers;
}

void Communicator::set_timeout(double seconds) {
  if (!(seconds > 0))  // NaN included
    throw Error(ErrorKind::kUsage, "a timeout of " + std::to_string(seconds) + " s for communicator '" +
                                       name() + "': expected a number of seconds above 0");
  runner_.set_timeout(seconds);
}

std::string Communicator::tuning() const {
  const std::lock_guard lock(tuning_mutex_);
  return tuning_;
}

void Communicator::set_tuning(const std::string& tuning) {
  Tuning parsed = Tuning::parse(tuning);
  throw_if_abandoned();
  const std::lock_guard lock(tuning_mutex_);
  if (!queue_.if_idle([&] { runner_.exchange().plans().set_tuning(std::move(parsed), *transport_); }))
    throw Error(ErrorKind::kUsage,
                "communicator '" + name() + "' cannot be tuned while operations are in progress");
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
  return "costs " + format_costs(PlanCache::fit(probes, *transport_));
}

void Communicator::complete(Operation& operation, const CallOptions& options) {
  throw_if_abandoned();
  runner_.complete(operation);
  validate(operation, rank(), size(), name());
  if (operation.on_devices == nullptr) return;
  await_queued(last_conflict(operation), options);
  take_from_devices(operation);
}

void Communicator::take_from_devices(Operation& operation) {
  try {
    runner_.take_from_devices(operation);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kUsage) throw;
    queue_.fail_and_raise(operation.descriptor);
  }
}

void Communicator::run(Operation& operation, const CallOptions& options) {
  complete(operation, options);
  const OperationLock operation_lock(queue_, operation, options);
  execute(operation, operation_lock.options());
}

void Communicator::execute(Operation& operation, const CallOptions& options) {
  const OperationRunner::Call call(runner_, operation.descriptor, options);
  try {
    runner_.run(call, operation);
  } catch (...) {
    queue_.fail_and_raise(operation.descriptor, true);
  }
}

void Communicator::prepare(Operation& operation) {
  complete(operation, {});
  operation.descriptor.asynchronous = true;
}

std::shared_ptr<Work> Communicator::submit(Operation operation, int priority,
                                           std::shared_ptr<void> keep_alive, double timeout) {
  prepare(operation);
  if (timeout == 0)
    throw_usage(operation, "a timeout of 0 s for an asynchronous operation: expected a number above 0");
  const QueuedWork queued{
      std::make_shared<Work>(std::move(operation), std::move(keep_alive), first_error_.seen()), priority,
      timeout};
  enqueue({&queued, 1});
  return queued.work;
}

void Communicator::enqueue(std::span<const QueuedWork> queued, bool runs_here) {
  throw_if_abandoned();
  queue_.enqueue(queued, runs_here);
}

void Communicator::require_peer(const Operation& operation, int peer) const {
  if (peer == rank()) throw_usage(operation, "a rank cannot send to or receive from itself");
  if (!transport_->fully_linked() && !transport_->has_link(rank(), peer))
    throw_usage(operation, "its host " + transport_->host(peer) + " is no neighbour of " +
                               transport_->host(rank()) +
                               " (MULTIRING_HOST_LINKS): pass the message on from rank to rank, or use a "
                               "collective");
}

void Communicator::run_message(Operation& operation, std::int64_t tag, const CallOptions& options,
                               std::optional<std::uint64_t> after, bool sends) {
  throw_if_abandoned();
  validate(operation, rank(), size(), name());
  require_peer(operation, operation.descriptor.key.root);
  queue_.throw_if_unusable();
  await_queued(after.value_or(last_conflict(operation)), options);
  if (operation.on_devices != nullptr) take_from_devices(operation);
  try {
    runner_.run_message(operation, tag, options, sends);
  } catch (...) {
    queue_.fail_and_raise(operation.descriptor);
  }
}

void Communicator::check_sources(Operation& operation, ProbeRequest& request) const {
  std::vector<int>& sources = request.sources;
  if (sources.empty())
    for (int peer = 0; peer < size(); ++peer)
      if (peer != rank() && (transport_->fully_linked() || transport_->has_link(peer, rank())))
        sources.push_back(peer);
  if (sources.empty()) throw_usage(operation, "there is no other rank that could send to this one");
  std::ranges::sort(sources);
  const auto twice = std::ranges::unique(sources);
  sources.erase(twice.begin(), twice.end());
  int& root = operation.descriptor.key.root;
  for (const int source : sources) {
    root = source;
    validate(operation, rank(), size(), name());
    require_peer(operation, source);
  }
  if (sources.size() > 1) root = -1;
  for (const int needed : request.needed)
    if (!std::ranges::binary_search(sources, needed))
      throw_usage(operation,
                  runner_.exchange().name_of(needed) + " is needed, but its messages are not waited for");
}

std::optional<MessageInfo> Communicator::probe(ProbeRequest request, const CallOptions& options) {
  throw_if_abandoned();
  Operation operation;  // the receive that follows, for messages
  operation.descriptor.key.kind = OpKind::kReceive;
  check_sources(operation, request);
  queue_.throw_if_unusable();
  try {
    return runner_.probe(operation.descriptor, request, options);
  } catch (const Error& error) {
    // A probe that has run out of time breaks nothing; the error of a group that is broken may be a timeout.
    if (error.kind() == ErrorKind::kTimeout && !transport_->aborted(nullptr)) throw;
    queue_.fail_and_raise(operation.descriptor);
  }
}

void Communicator::abort_with(const Error& error) {
  throw_if_abandoned();
  queue_.break_by(error, error.context());
  first_error_.note_seen();
}

bool Communicator::is_broken() const {
  if (abandoned_.load(std::memory_order_acquire) || first_error_.is_set()) return true;
  try {
    return transport_->aborted(nullptr);  // which may read from the network
  } catch (const Error&) {
    return true;
  }
}

void Communicator::close() {
  if (abandoned_.load(std::memory_order_acquire)) return queue_.abandon_thread();
  if (queue_.close()) runner_.release();
}

void Communicator::wake() {
  if (!abandoned_.load(std::memory_order_acquire)) transport_->wake();
}

void Communicator::throw_if_abandoned() const {
  // Before any lock is taken: in a forked child a lock may be held by a thread that does not exist there.
  if (abandoned_.load(std::memory_order_acquire))
    throw Error(ErrorKind::kUsage,
                "communicator '" + options_.name +
                    "' belongs to the parent process: a forked child must not use it (start "
                    "data loaders before multiring.init() or leave communication to the parent)");
}

void Communicator::abandon() {
  runner_.cancel();
  abandoned_.store(true, std::memory_order_release);
  transport_->abandon();
}

}  // namespace multiring
