#include "engine/named_queue.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "engine/validate.h"

namespace multiring {
namespace {

// How long a rank pauses between rounds that brought nothing new, with operations of its own unmatched: the
// peers compute, and may announce at any time. Something new on this rank ends the pause.
constexpr std::chrono::microseconds kFirstPause(20);
constexpr std::chrono::microseconds kLongestPause(1000);
constexpr std::size_t kLongestName = 4096;

// What comes here lies in memory of a framework's, where each array costs the same steps as in one pass over
// several: to fill and to empty the staging memory. Only the first of several is done later.
constexpr std::size_t kFuseBelow = std::size_t{16} << 20;
constexpr std::size_t kFuseAtMost = std::size_t{64} << 20;

Operation allgather_of(std::span<const std::byte> message) {
  Operation operation;
  Descriptor& descriptor = operation.descriptor;
  descriptor.key.kind = OpKind::kAllgather;
  descriptor.key.count = 1;
  descriptor.dtype = DType::kUInt8;
  descriptor.dims = 1;
  descriptor.shape[0] = descriptor.rows = descriptor.bytes = message.size();
  descriptor.set_name("names");
  operation.input = message.data();
  return operation;
}

}  // namespace

std::shared_ptr<NamedQueue> NamedQueue::create(Communicator& parent, const std::string& name,
                                               const CallOptions& call) {
  if (name.empty()) throw Error(ErrorKind::kUsage, "a named queue needs a name");
  auto control = parent.duplicate(name + "/names", call, [](CommunicatorOptions& options) {
    options.stall_warning = 0;  // the queue itself warns, in terms of names
  });
  auto data = parent.duplicate(name, call, [](CommunicatorOptions& options) {
    options.fuse_below = kFuseBelow;
    options.fuse_at_most = kFuseAtMost;
  });
  return std::shared_ptr<NamedQueue>(new NamedQueue(std::move(control), std::move(data)));
}

NamedQueue::NamedQueue(std::shared_ptr<Communicator> control, std::shared_ptr<Communicator> data)
    : control_(std::move(control)), data_(std::move(data)), matcher_(data_->size()) {}

NamedQueue::~NamedQueue() { close(); }

NamedQueue::Works NamedQueue::submit(NamedRequest request) {
  throw_if_abandoned();
  prepare(request);
  // Not a reference that keeps the queue: the last one would end it on its own thread. All submissions have
  // ended when close() returns.
  const auto submission =
      Submission::make(std::move(request), this, [this](const Error& error) { break_with(error); });
  Works works = submission->works();
  try {
    hand_over(submission);
  } catch (...) {
    submission->discard();
    throw;
  }
  return works;
}

void NamedQueue::hand_over(const std::shared_ptr<Submission>& submission) {
  {
    const std::lock_guard lock(mutex_);
    throw_if_unusable();
    if (size() > 1) {
      start_control();
      waiting_[submission->name()].push_back(submission);
      fresh_.push_back(submission);
    }
  }
  if (size() > 1) {
    changed_.notify_all();
    return;
  }
  std::vector<QueuedWork> queued;  // one rank has nobody to agree with
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
    if (kind == OpKind::kSend || kind == OpKind::kReceive || kind > OpKind::kReceive)
      throw_usage(operation, "only collectives can be submitted to a named queue");
    if (operation.descriptor.name_view().empty())
      operation.descriptor.set_name(
          request.operations.size() == 1 ? request.name : request.name + "[" + std::to_string(i) + "]");
    data_->prepare(operation);
  }
}

void NamedQueue::start_control() {
  if (control_thread_.joinable()) return;
  try {
    control_thread_ = std::thread([this] { negotiate(); });
    control_id_ = control_thread_.get_id();
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::kInternal,
                "rank " + std::to_string(rank()) + " cannot start the thread of named queue '" + name() +
                    "': " + error.what() + ". Is a limit of processes reached (ulimit -u)?");
  }
}

void NamedQueue::negotiate() {
  go_on_with_rounds();
  if (!closing_.load(std::memory_order_acquire)) return;
  leave_names();
  data_->close();
}

void NamedQueue::go_on_with_rounds() {
  std::chrono::microseconds pause = kFirstPause;
  const auto ended = [this] { return closing_.load(std::memory_order_relaxed) || first_error_.has_value(); };
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ended() || !waiting_.empty(); });
      if (ended()) return;
    }
    try {
      pause = round() ? kFirstPause : std::min(pause * 2, kLongestPause);
    } catch (...) {
      if (!closing_.load(std::memory_order_acquire)) break_with(with_names(std::current_exception()));
      return;  // or close() ends what waits
    }
    std::unique_lock lock(mutex_);
    if (!waiting_.empty())
      changed_.wait_for(lock, pause, [&] { return ended() || waiting_.empty() || !fresh_.empty(); });
  }
}

// Whether any rank had something new.
bool NamedQueue::round() {
  const bool anything = exchange(news());
  std::vector<std::shared_ptr<Submission>> taken;
  const std::vector<QueuedWork> queued = take_matched(taken);
  try {
    if (!queued.empty()) data_->enqueue(queued);
  } catch (...) {
    // They wait for nobody any more, so nobody else would end them. Where a peer's error came in between, it
    // is theirs, too, and not that the communicator is broken.
    const Error error = data_->first_error().value_or(with_names(std::current_exception()));
    for (const auto& submission : taken) submission->fail(error);
    throw Error(error);
  }
  watch();
  return anything;
}

std::vector<std::byte> NamedQueue::news() {
  std::deque<std::shared_ptr<Submission>> fresh;
  {
    const std::lock_guard lock(mutex_);
    fresh.swap(fresh_);
  }
  std::vector<Announcement> announcements;
  announcing_.clear();
  for (const auto& submission : fresh) {
    announcing_.push_back(submission->name());
    announcements.push_back({submission->name(), submission->priority(),
                             static_cast<std::uint32_t>(submission->works().size()), submission->step(),
                             submission->place()});
  }
  return matcher_.encode(announcements);
}

// Gives this rank's message to all and takes those of all into the matcher. Whether any was not empty.
bool NamedQueue::exchange(std::vector<std::byte> message) {
  Operation operation = allgather_of(message);
  const std::function<void()> look = [this] { watch(); };
  control_->run(operation, {std::numeric_limits<double>::infinity(), &look});
  announcing_.clear();
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
  if (first_error_) return queued;  // everything has been ended
  for (const Match& match : matches) {
    const auto found = waiting_.find(match.name);
    taken.push_back(std::move(found->second.front()));
    found->second.pop_front();
    if (found->second.empty()) waiting_.erase(found);
    for (const auto& work : taken.back()->works()) queued.push_back({work, match.priority});
  }
  return queued;
}

}  // namespace multiring
