#include "capi/queue.h"

#include <utility>
#include <vector>

#include "capi/handles.h"

using multiring::Error;
using multiring::ErrorKind;
using multiring::NamedQueue;

mr_queue::mr_queue(std::shared_ptr<NamedQueue> queue)
    : rank_(queue->rank()), size_(queue->size()), name_(queue->name()), queue_(std::move(queue)) {}

std::shared_ptr<NamedQueue> mr_queue::get() const {
  if (abandoned_.load(std::memory_order_acquire))
    throw Error(ErrorKind::kUsage,
                "named queue '" + name_ + "' belongs to the parent process: a forked child must not use it");
  const std::lock_guard lock(mutex_);
  if (queue_ == nullptr)
    throw Error(ErrorKind::kAborted,
                "named queue '" + name_ + "' is closed on rank " + std::to_string(rank_) +
                    " (by its close(), that of its communicator or multiring.shutdown())");
  return queue_;
}

bool mr_queue::is_closed() const {
  if (abandoned_.load(std::memory_order_acquire)) return true;
  const std::lock_guard lock(mutex_);
  return queue_ == nullptr;
}

bool mr_queue::is_broken() const {
  try {
    return get()->is_broken();
  } catch (const Error&) {  // closed
    return true;
  }
}

bool mr_queue::close() {
  if (abandoned_.load(std::memory_order_acquire)) return false;
  std::shared_ptr<NamedQueue> queue;
  {
    const std::lock_guard lock(mutex_);
    queue = queue_;
  }
  if (queue == nullptr) return true;
  if (!queue->close()) return false;
  const std::lock_guard lock(mutex_);
  queue_ = nullptr;
  return true;
}

void mr_queue::abandon() {
  abandoned_.store(true, std::memory_order_release);
  // No lock, which a thread of the parent may have held. Never destroyed: its threads are not there to end.
  if (queue_ == nullptr) return;
  queue_->abandon();
  new std::shared_ptr<NamedQueue>(queue_);
}

namespace multiring {
namespace {

/// Calls a C callback as the queue calls its own.
NamedRequest::Done calling(mr_done done, void* context) {
  if (done == nullptr) return {};
  return [done, context](const Error* failure, std::span<const std::shared_ptr<Work>> works) {
    std::vector<mr_work> handles;
    handles.reserve(works.size());
    std::vector<mr_work*> pointers;
    for (const auto& work : works) {
      handles.push_back({work, {}});
      pointers.push_back(&handles.back());
    }
    mr_error error;
    mr_status status = MR_OK;
    if (failure != nullptr) status = report(&error, failure->kind(), failure->what(), failure->context());
    done(context, status, failure != nullptr ? &error : nullptr, pointers.data());
  };
}

}  // namespace
}  // namespace multiring

mr_status mr_queue_create(mr_communicator* communicator, mr_queue** queue, mr_error* error) {
  return multiring::guarded(error, [&] {
    auto made = NamedQueue::create(*communicator->communicator, "queue", {});
    {
      const std::lock_guard lock(communicator->mutex);
      std::erase_if(communicator->queues, [](const auto& known) { return known.expired(); });
      communicator->queues.push_back(made);
    }
    *queue = new mr_queue(std::move(made));
  });
}

int mr_queue_rank(const mr_queue* queue) { return queue->rank(); }
int mr_queue_size(const mr_queue* queue) { return queue->size(); }

mr_status mr_queue_submit(mr_queue* queue, const mr_submission* submission, mr_error* error) {
  return multiring::guarded(error, [&] {
    if (submission->struct_size != sizeof(mr_submission))
      multiring::refuse("mr_submission of another version: initialise it with MR_SUBMISSION_INIT");
    if (submission->name == nullptr || submission->count < 1)
      multiring::refuse("a named submission needs a name and operations");
    const std::shared_ptr<NamedQueue> target = queue->get();
    multiring::NamedRequest request;
    request.name = submission->name;
    request.priority = submission->priority;
    request.step = submission->step;
    request.position = submission->position;
    request.done = multiring::calling(submission->done, submission->context);
    for (int i = 0; i < submission->count; ++i)
      request.operations.push_back(multiring::convert(submission->operations[i], queue->size()));
    target->submit(std::move(request));
  });
}

int mr_queue_is_broken(const mr_queue* queue) { return static_cast<int>(queue->is_broken()); }

void mr_queue_abort(mr_queue* queue, const char* message) {
  multiring::guarded(nullptr, [&] { queue->get()->abort(Error(ErrorKind::kAborted, message)); });
}

void mr_queue_close(mr_queue* queue) {
  multiring::guarded(nullptr, [&] { queue->close(); });
}

void mr_queue_free(mr_queue* queue) {
  bool ended = true;
  if (queue != nullptr) multiring::guarded(nullptr, [&] { ended = queue->close(); });
  if (ended) delete queue;  // inside `done` its own threads still need it
}
