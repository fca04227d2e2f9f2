#include "engine/named/submission.h"

#include <algorithm>
#include <utility>

#include "engine/memory_in_flight.h"

namespace multiring {
namespace {

/// The callbacks that this thread is in.
struct Frame {
  const void* owner;
  const Frame* below;
};
thread_local const Frame* innermost = nullptr;

}  // namespace

std::shared_ptr<Submission> Submission::make(NamedRequest request, const void* owner,
                                             const ErrorSeen& error_seen, Failed failed) {
  const std::shared_ptr<Submission> made(new Submission());
  made->name_ = std::move(request.name);
  made->priority_ = request.priority;
  made->step_ = request.step;
  made->position_ = request.position;
  made->done_ = std::move(request.done);
  made->failed_ = std::move(failed);
  made->owner_ = owner;
  made->unfinished_ = request.operations.size();
  // The works keep the submission and it keeps them, until all have ended.
  for (Operation& operation : request.operations)
    made->works_.push_back(
        std::make_shared<Work>(std::move(operation), request.keep_alive, error_seen, made));
  return made;
}

void Submission::fail(const Error& error) {
  for (const auto& work : works()) work->fail(error);
}

bool Submission::shares_memory(const Operation& operation) const {
  return std::ranges::any_of(
      works(), [&](const auto& work) { return multiring::share_memory(work->operation(), operation); });
}

bool Submission::shares_memory(const Submission& other) const {
  return std::ranges::any_of(other.works(),
                             [&](const auto& work) { return shares_memory(work->operation()); });
}

bool Submission::inside(const void* owner) {
  for (const Frame* frame = innermost; frame != nullptr; frame = frame->below)
    if (frame->owner == owner) return true;
  return false;
}

void Submission::ended(const Error* error) {
  {
    const std::lock_guard lock(mutex_);
    if (error != nullptr && !first_error_) first_error_ = *error;
    if (--unfinished_ > 0) return;
  }
  all_ended();
}

void Submission::all_ended() {
  std::vector<std::shared_ptr<Work>> works;
  {
    const std::lock_guard lock(mutex_);
    works.swap(works_);
  }
  if (!done_) return;
  const Frame frame{owner_, innermost};
  innermost = &frame;
  // No caller can catch what a callback raises; it must neither be lost nor end the process.
  try {
    done_(first_error_ ? &*first_error_ : nullptr, works);
  } catch (const std::exception& raised) {
    failed_(
        Error(ErrorKind::kInternal, "the completion callback of '" + name_ + "' raised: " + raised.what()));
  } catch (...) {
    failed_(
        Error(ErrorKind::kInternal, "the completion callback of '" + name_ + "' raised something unknown"));
  }
  innermost = frame.below;
  done_ = nullptr;
}

}  // namespace multiring
