#include "engine/named/named_queue.h"

#include <algorithm>
#include <limits>
#include <span>
#include <unordered_set>
#include <utility>

#include "collective/kinds.h"
#include "engine/communicator_list.h"
#include "engine/validate.h"

namespace multiring {
namespace {

// Pause between negotiations that brought nothing new, while operations of this rank are unmatched: the peers
// compute, and may announce at any time. A new submission of this rank ends the pause.
constexpr std::chrono::microseconds kFirstPause(20);
constexpr std::chrono::microseconds kLongestPause(1000);
constexpr std::size_t kLongestName = 4096;

// Arrays of named queues are in a framework's memory and pass through staging memory, so fusing them costs no
// additional copies; only the first of several completes later.
constexpr std::size_t kFuseBelow = std::size_t{16} << 20;
constexpr std::size_t kFuseAtMost = std::size_t{64} << 20;

// A single operation of up to so many bytes runs on the control thread: to wake the other one takes longer.
constexpr std::size_t kRunAtOnce = 16 * 1024;

Operation allgather_of(std::span<const std::byte> message) {
  Operation operation;
  Descriptor& descriptor = operation.descriptor;
  descriptor.key.kind = OpKind::kAllgather;
  descriptor.dtype = DType::kUInt8;
  descriptor.dims = 1;
  descriptor.shape[0] = message.size();
  set_extents(descriptor);
  descriptor.set_name("names");
  operation.input = message.data();
  return operation;
}

}  // namespace

std::shared_ptr<NamedQueue> NamedQueue::create(Communicator& parent, const std::string& name,
                                               const CallOptions& call) {
  if (name.empty()) throw Error(ErrorKind::kUsage, "a named queue needs a name");
  auto control = parent.duplicate(name + kNamesOfQueue, call, [](CommunicatorOptions& options) {
    options.stall_warning = 0;  // the queue itself warns, in terms of names
  });
  auto data = parent.duplicate(name, call, [](CommunicatorOptions& options) {
    options.fuse_below = kFuseBelow;
    options.fuse_at_most = kFuseAtMost;
  });
  return std::shared_ptr<NamedQueue>(new NamedQueue(std::move(control), std::move(data)));
}

NamedQueue::NamedQueue(std::shared_ptr<Communicator> control, std::shared_ptr<Communicator> data)
    : control_(std::move(control)),
      data_(std::move(data)),
      first_error_("named queue '" + data_->name() + "'", data_->rank()),
      matcher_(data_->size(), data_->rank()) {
  control_->share_number(*data_);
}

NamedQueue::~NamedQueue() { close(); }

NamedQueue::Works NamedQueue::submit(NamedRequest request) {
  throw_if_abandoned();
  prepare(request);
  // A framework has many operations in progress and reports any of those that fail: each that has a `done`
  // is told the first error itself.
  const ErrorSeen error_seen =
      request.done ? std::make_shared<std::atomic<bool>>(false) : first_error_.seen();
  // No owning reference: the last one would destroy the queue on its own thread. All submissions have ended
  // when close() returns.
  const auto submission =
      Submission::make(std::move(request), this, error_seen, [this](const Error& error) { fail(error); });
  Works works = submission->works();
  try {
    enqueue(submission, error_seen);
  } catch (...) {
    submission->discard();
    throw;
  }
  return works;
}

void NamedQueue::enqueue(const std::shared_ptr<Submission>& submission, const ErrorSeen& error_seen) {
  {
    const std::lock_guard lock(mutex_);
    throw_if_unusable(error_seen);
    if (size() > 1) {
      start_control();
      find_conflicts(*submission);
      unmatched_[submission->name()].push_back(submission);
      (submission->waits_for.empty() ? unannounced_ : held_back_).push_back(submission);
    }
  }
  if (size() > 1) {
    changed_.notify_all();
    return;
  }
  std::vector<QueuedWork> queued;  // one rank needs no negotiation
  for (const auto& work : submission->works()) queued.push_back({work, submission->priority()});
  data_->enqueue(queued);
}

void NamedQueue::prepare(NamedRequest& request) const {
  if (request.name.empty())
    throw Error(ErrorKind::kUsage, "an operation of named queue '" + name() + "' needs a name");
  if (request.name.size() > kLongestName)
    throw Error(ErrorKind::kUsage, "a name of " + std::to_string(request.name.size()) +
                                       " bytes; a named queue takes at most " + std::to_string(kLongestName));
  if (request.operations.empty())
    throw Error(ErrorKind::kUsage, "no operations were given under the name '" + request.name + "'");
  for (std::size_t i = 0; i < request.operations.size(); ++i) {
    Operation& operation = request.operations[i];
    const OpKind kind = operation.descriptor.key.kind;
    if (!is_collective(kind)) throw_usage(operation, "only collectives can be submitted to a named queue");
    if (operation.descriptor.name_view().empty())
      operation.descriptor.set_name(
          request.operations.size() == 1 ? request.name : request.name + "[" + std::to_string(i) + "]");
    if (operation.on_devices != nullptr) await_unmatched(operation, {});
    data_->prepare(operation);
  }
}

// A range of the set may be that of a submission that has been matched long ago.
void NamedQueue::find_conflicts(Submission& submission) {
  submission.number = ++submitted_;
  if (unmatched_.empty()) memory_.clear();
  std::uint64_t found = 0;
  for (const auto& work : submission.works())
    found = std::max(found, memory_.add(work->operation(), submission.number, 1));
  if (found == 0 && held_back_.empty()) return;
  const auto is_before = [&](const auto& other) {
    return other->number != submission.number && found > 0 && other->shares_memory(submission);
  };
  for (const auto& [name, others] : unmatched_)
    for (const auto& other : others)
      if (is_before(other)) submission.waits_for.push_back(other->number);
  for (const auto& other : held_back_)  // a rank announces its uses of a name in their order
    if (other->name() == submission.name()) submission.waits_for.push_back(other->number);
}

void NamedQueue::release_held_back() {
  std::unordered_set<std::uint64_t> unmatched;
  for (const auto& [name, submissions] : unmatched_)
    for (const auto& submission : submissions) unmatched.insert(submission->number);
  std::erase_if(held_back_, [&](const auto& submission) {
    std::erase_if(submission->waits_for, [&](std::uint64_t number) { return !unmatched.contains(number); });
    if (!submission->waits_for.empty()) return false;
    unannounced_.push_back(submission);
    return true;
  });
}

void NamedQueue::await_queued(const Operation& operation, const CallOptions& call) {
  throw_if_abandoned();
  await_unmatched(operation, call);
  data_->await_queued(data_->last_conflict(operation), call);
}

void NamedQueue::await_unmatched(const Operation& operation, const CallOptions& call) const {
  std::unique_lock lock(mutex_);
  const auto conflicts = [&] {
    for (const auto& [name, submissions] : unmatched_)
      for (const auto& submission : submissions)
        if (submission->shares_memory(operation)) return true;
    return false;
  };
  while (conflicts()) {
    throw_if_unusable(first_error_.seen());
    if (control_id_ == std::this_thread::get_id())
      throw_usage(operation,
                  "it shares memory with an operation that is not matched yet, which a callback of "
                  "the queue cannot wait for");
    changed_.wait_for(lock, kLongestPause);
    if (call.interrupt == nullptr || !*call.interrupt) continue;
    lock.unlock();
    (*call.interrupt)();
    lock.lock();
  }
}

void NamedQueue::start_control() {
  if (control_thread_.joinable()) return;
  try {
    control_thread_ = std::thread([this] { run_control(); });
    control_id_ = control_thread_.get_id();
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::kInternal,
                "rank " + std::to_string(rank()) + " cannot start the thread of named queue '" + name() +
                    "': " + error.what() + ". Is a limit of processes reached (ulimit -u)?");
  }
}

void NamedQueue::run_control() {
  negotiate_until_ended();
  if (!closing_.load(std::memory_order_acquire)) return;
  fail_unmatched();
  data_->close();
}

void NamedQueue::negotiate_until_ended() {
  std::chrono::microseconds pause = kFirstPause;
  const auto ended = [this] { return closing_.load(std::memory_order_relaxed) || first_error_.is_set(); };
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ended() || !unmatched_.empty(); });
      if (ended()) return;
    }
    try {
      pause = negotiate() ? kFirstPause : std::min(pause * 2, kLongestPause);
    } catch (...) {
      if (!closing_.load(std::memory_order_acquire)) fail(with_unmatched_names(std::current_exception()));
      return;  // or close() fails what waits
    }
    std::unique_lock lock(mutex_);
    if (!unmatched_.empty())
      changed_.wait_for(lock, pause, [&] { return ended() || unmatched_.empty() || !unannounced_.empty(); });
  }
}

// Returns whether any rank had something new.
bool NamedQueue::negotiate() {
  const bool anything = exchange_messages(encode_new());
  std::vector<std::shared_ptr<Submission>> taken;
  const std::vector<QueuedWork> queued = take_matched(taken);
  try {
    if (may_run_at_once(queued))
      data_->enqueue_and_run(queued);
    else if (!queued.empty())
      data_->enqueue(queued);
  } catch (...) {
    // They are matched, so nothing else would fail them. A peer's error that came in between is theirs, too,
    // not that the communicator is broken.
    const Error error = data_->first_error().value_or(with_unmatched_names(std::current_exception()));
    for (const auto& submission : taken) submission->fail(error);
    throw Error(error);
  }
  check_deadlines();
  return anything;
}

// A thread that submits more meanwhile shall not wait for it.
bool NamedQueue::may_run_at_once(const std::vector<QueuedWork>& queued) const {
  if (queued.size() != 1 || queued[0].work->operation().descriptor.bytes > kRunAtOnce) return false;
  const std::lock_guard lock(mutex_);
  return unmatched_.empty();
}

std::vector<std::byte> NamedQueue::encode_new() {
  std::deque<std::shared_ptr<Submission>> fresh;
  {
    const std::lock_guard lock(mutex_);
    fresh.swap(unannounced_);
  }
  std::vector<Announcement> announcements;
  names_in_negotiation_.clear();
  for (const auto& submission : fresh) {
    names_in_negotiation_.push_back(submission->name());
    announcements.push_back({submission->name(), submission->priority(),
                             static_cast<std::uint32_t>(submission->works().size()), submission->step(),
                             submission->position()});
  }
  return matcher_.encode(announcements);
}

// Exchanges the messages of all ranks and gives them to the matcher. Returns whether any was not empty.
bool NamedQueue::exchange_messages(std::vector<std::byte> message) {
  Operation operation = allgather_of(message);
  const std::function<void()> check = [this] { check_deadlines(); };
  control_->run(operation, {std::numeric_limits<double>::infinity(), &check});
  names_in_negotiation_.clear();
  const std::byte* begin = operation.result.data();
  for (int rank = 0; rank < size(); ++rank) {
    const std::size_t bytes = operation.received[static_cast<std::size_t>(rank)];
    matcher_.take(rank, {begin, bytes});
    begin += bytes;
  }
  return operation.result.bytes() > 0;
}

std::vector<QueuedWork> NamedQueue::take_matched(std::vector<std::shared_ptr<Submission>>& taken) {
  const std::vector<Match> matches = matcher_.matched();
  std::vector<QueuedWork> queued;
  const std::lock_guard lock(mutex_);
  if (first_error_.is_set()) return queued;  // everything has failed
  for (const Match& match : matches) {
    const auto found = unmatched_.find(match.name);
    taken.push_back(std::move(found->second.front()));
    found->second.pop_front();
    if (found->second.empty()) unmatched_.erase(found);
    for (const auto& work : taken.back()->works()) queued.push_back({work, match.priority});
  }
  if (!held_back_.empty()) release_held_back();
  return queued;
}

}  // namespace multiring
