// How a named queue ends: deadlines, its first error, close, a fork of its process, and the messages of
// these.

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/text.h"
#include "collective/kinds.h"
#include "collective/rank_list.h"
#include "engine/named/named_queue.h"
#include "engine/validate.h"

namespace multiring {
namespace {

constexpr std::chrono::milliseconds kCheckInterval(5);
constexpr std::size_t kMaxListed = 6;

/// "rank 0 submitted 'a' and waits for rank 1, which has not submitted it"
std::string sentence(const Unmatched& unmatched, const Communicator& communicator) {
  const bool one = unmatched.announced.size() == 1;
  return communicator.names_of(unmatched.announced) + " submitted '" + unmatched.name + "' and " +
         (one ? "waits" : "wait") + " for " + communicator.names_of(unmatched.missing) + ", which " +
         (unmatched.missing.size() == 1 ? "has" : "have") + " not submitted it";
}

/// Whether all ranks have come to the negotiation in progress, and some do not forward what others announce.
bool is_not_forwarded(const Stragglers& missing) {
  return missing.late.empty() && !missing.forwarding.empty();
}

}  // namespace

void NamedQueue::check_deadlines() {
  // Ends the wait that this is called in. Throwing here would be an abort on the peers.
  if (closing_.load(std::memory_order_acquire)) return control_->close();
  const Clock::time_point now = Clock::now();
  if (now - checked_ < kCheckInterval) return;
  checked_ = now;
  const CommunicatorOptions& options = data_->options();
  std::shared_ptr<Submission> late;
  double stalled = 0;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [name, submissions] : unmatched_)
      for (const auto& submission : submissions) {
        const double waited = submission->waited();
        if (waited >= options.timeout && (late == nullptr || waited > late->waited())) late = submission;
        if (options.stall_warning <= 0 || waited < options.stall_warning || submission->warned) continue;
        submission->warned = true;
        stalled = std::max(stalled, waited);
      }
  }
  if (late != nullptr) throw late_error(*late);
  if (stalled > 0 && options.warn && is_first_waiting(control_->waited_for(), rank()))
    options.warn(data_->names_of({rank()}) + " on " + data_->host() + ", in named queue '" + name() +
                 "', has waited " + seconds_text(stalled) + ": " + describe_unmatched() + kHowToSilence);
}

Error NamedQueue::late_error(const Submission& late) const {
  ErrorContext context;
  context.rank = rank();
  context.host = data_->host();
  context.tensor = late.name();
  context.elapsed = late.waited();
  const Stragglers absent = control_->waited_for();
  const std::vector<int>& first = absent.late.empty() ? absent.forwarding : absent.late;
  if (!first.empty()) context.peer = first.front();
  std::string text = data_->names_of({rank()}) + " on " + data_->host() + ", in named queue '" + name() +
                     "', waited " + seconds_text(late.waited()) + " for '" + late.name() +
                     "' to be submitted on all ranks: " + describe_unmatched() + ". ";
  for (const int peer : absent.late) {
    std::string named = data_->names_of({peer});
    named.front() = 'R';
    text +=
        named + " (process " + std::to_string(control_->process_id(peer)) +
        (control_->is_watched(peer) ? ", alive) waits for nothing" : ") is not known to wait for anything") +
        " in this queue; see where it is with `py-spy dump --pid`. ";
  }
  if (!is_not_forwarded(absent))
    text +=
        "Every rank has to submit the same names equally often, in any order; look for a branch or "
        "a loop length that depends on the rank. ";
  return Error(ErrorKind::kTimeout, text + "MULTIRING_TIMEOUT sets how long to wait.", context);
}

std::string NamedQueue::describe_unmatched() const {
  const Stragglers missing = control_->waited_for();
  if (is_not_forwarded(missing)) return data_->describe_not_forwarded(missing.forwarding);
  std::vector<int> absent;
  std::ranges::set_union(missing.late, missing.unknown, std::back_inserter(absent));
  std::vector<Unmatched> all = matcher_.unmatched();
  std::vector<int> others;
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank()) others.push_back(peer);
  // What this rank announces in the negotiation in progress is not in the matcher yet.
  for (const std::string& name : names_in_negotiation_) {
    const auto known = std::find_if(all.begin(), all.end(), [&](const Unmatched& one) {
      return one.name == name && std::count(one.missing.begin(), one.missing.end(), rank()) > 0;
    });
    if (known == all.end()) {
      all.push_back({name, {rank()}, absent.empty() ? others : absent});
      continue;
    }
    std::erase(known->missing, rank());
    if (known->missing.empty()) {
      all.erase(known);  // matched when the negotiation is over
      continue;
    }
    known->announced.insert(std::upper_bound(known->announced.begin(), known->announced.end(), rank()),
                            rank());
  }
  // Ranks that have come to the negotiation in progress may have announced anything in it: list the others.
  for (Unmatched& one : all) {
    std::vector<int> known_missing;
    std::set_intersection(one.missing.begin(), one.missing.end(), absent.begin(), absent.end(),
                          std::back_inserter(known_missing));
    if (!known_missing.empty()) one.missing = std::move(known_missing);
  }
  std::stable_partition(all.begin(), all.end(), [this](const Unmatched& one) {
    return std::count(one.announced.begin(), one.announced.end(), rank()) > 0;
  });
  std::string text;
  for (std::size_t i = 0; i < std::min(all.size(), kMaxListed); ++i)
    text += (i > 0 ? "; " : "") + sentence(all[i], *data_);
  if (all.size() > kMaxListed) text += "; and " + std::to_string(all.size() - kMaxListed) + " more";
  return text;
}

// An error of the control communicator, with the operations that it leaves unmatched.
Error NamedQueue::with_unmatched_names(const std::exception_ptr& raised) const {
  std::string first;
  std::size_t waiting = 0;
  {
    const std::lock_guard lock(mutex_);
    const Submission* oldest = nullptr;
    for (const auto& [name, submissions] : unmatched_)
      for (const auto& submission : submissions) {
        ++waiting;
        if (oldest == nullptr || submission->waited() > oldest->waited()) oldest = submission.get();
      }
    if (oldest != nullptr) first = oldest->name();
  }
  ErrorKind kind = ErrorKind::kInternal;
  ErrorContext context;
  std::string text;
  try {
    std::rethrow_exception(raised);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout) return error;
    if (error.kind() == ErrorKind::kMismatch) return mismatch_here(error);
    kind = error.kind();
    context = error.context();
    text = error.what();
  } catch (const std::exception& error) {
    text = "rank " + std::to_string(rank()) + ": " + error.what();
  }
  context.tensor = first;
  if (waiting > 0)
    text = "named queue '" + name() + "' waited for '" + first + "'" +
           (waiting > 1 ? " and " + std::to_string(waiting - 1) + " more" : "") + ": " + text;
  return Error(kind, text, context);
}

// The matcher knows names only, and a peer's error was met in an exchange of names.
Error NamedQueue::mismatch_here(const Error& mismatch) const {
  ErrorContext context = mismatch.context();
  context.rank = rank();
  context.host = data_->host();
  const std::lock_guard lock(mutex_);
  const auto found = unmatched_.find(context.tensor);
  if (found != unmatched_.end()) {
    const Descriptor& descriptor = found->second.front()->works().front()->operation().descriptor;
    context.operation = traits_of(descriptor).name;
    context.bytes = static_cast<std::int64_t>(descriptor.bytes);
  }
  return Error(ErrorKind::kMismatch, mismatch.what(), context);
}

std::vector<std::shared_ptr<Submission>> NamedQueue::take_unmatched() {
  std::vector<std::shared_ptr<Submission>> taken;
  for (auto& [name, submissions] : unmatched_)
    for (auto& submission : submissions) taken.push_back(std::move(submission));
  unmatched_.clear();
  unannounced_.clear();
  held_back_.clear();
  return taken;
}

void NamedQueue::fail(const Error& error) {
  std::vector<std::shared_ptr<Submission>> pending;
  bool first;
  {
    const std::lock_guard lock(mutex_);
    if (closing_.load(std::memory_order_relaxed)) return;  // close() ends what is pending
    first = first_error_.store(error);
    pending = take_unmatched();
  }
  changed_.notify_all();
  if (first) {
    control_->abort_with(error);
    data_->abort_with(error);
  }
  for (const auto& submission : pending) submission->fail(error);
}

void NamedQueue::abort(const Error& error) {
  throw_if_abandoned();
  fail(error);
  first_error_.note_seen();
}

bool NamedQueue::is_broken() const {
  return abandoned_.load(std::memory_order_acquire) || first_error_.is_set() || control_->is_broken() ||
         data_->is_broken();
}

Error NamedQueue::closed_error() const {
  return Error(ErrorKind::kAborted,
               "named queue '" + name() + "' is closed on rank " + std::to_string(rank()) +
                   " (by its close(), that of its communicator or multiring.shutdown())");
}

void NamedQueue::throw_if_unusable(const ErrorSeen& error_seen) const {
  if (closing_.load(std::memory_order_relaxed)) throw closed_error();
  first_error_.throw_if_set(error_seen);
}

void NamedQueue::throw_if_abandoned() const {
  // Before any lock is taken: in a forked child a lock may be held by a thread that does not exist there.
  if (abandoned_.load(std::memory_order_acquire))
    throw Error(ErrorKind::kUsage,
                "the named queue belongs to the parent process: a forked child must not use it");
}

void NamedQueue::abandon() {
  abandoned_.store(true, std::memory_order_release);
  control_->abandon();
  data_->abandon();
}

bool NamedQueue::close() {
  if (abandoned_.load(std::memory_order_acquire)) return false;
  {
    const std::lock_guard lock(mutex_);
    closing_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
  if (on_queue_thread()) {                             // it cannot wait for its own end
    if (data_->runs_on_this_thread()) data_->close();  // only begins, too; the control thread may be in there
    return false;
  }
  const std::lock_guard closers(close_mutex_);
  if (std::exchange(closed_, true)) return true;
  control_->close();
  data_->close();  // the control thread may run an operation of it
  if (control_thread_.joinable()) control_thread_.join();
  fail_unmatched();  // where no thread was started, or it ended by an error
  return true;
}

bool NamedQueue::on_queue_thread() const {
  if (Submission::inside(this) || data_->runs_on_this_thread()) return true;
  const std::lock_guard lock(mutex_);
  return control_id_ == std::this_thread::get_id();
}

void NamedQueue::fail_unmatched() {
  control_->close();
  std::vector<std::shared_ptr<Submission>> pending;
  {
    const std::lock_guard lock(mutex_);
    pending = take_unmatched();
  }
  for (const auto& submission : pending)
    submission->fail(Error(ErrorKind::kAborted, "named queue '" + name() + "' was closed before '" +
                                                    submission->name() + "' was matched"));
}

}  // namespace multiring
