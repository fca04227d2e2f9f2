#include "multiring.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/hash/checksum.h"
#include "base/text.h"
#include "capi/convert.h"
#include "capi/guarded.h"
#include "capi/queue.h"
#include "collective/kinds.h"
#include "device/devices.h"
#include "device/staging.h"
#include "engine/program_calls.h"

struct mr_work {
  std::shared_ptr<multiring::Work> work;
};

namespace multiring {
namespace {

/// An error as the C ABI tells it: kept by its queue, under a number.
mr_error reported(mr_queue& queue, const Error& failure) {
  mr_error error = convert(failure);
  try {
    error.number = queue.keep(failure);
  } catch (const std::bad_alloc&) {  // it is told without its number
  }
  return error;
}

/// Runs `body`, and describes its error as the queue keeps it.
template <class Body>
mr_status guarded(mr_queue* queue, mr_error* error, const Body& body) {
  return guarded_by(
      [&](const Error& failure) {
        if (error != nullptr) *error = reported(*queue, failure);
      },
      body);
}

/// Calls a C callback as the queue calls its own.
NamedRequest::Done calling(mr_queue* queue, mr_done done, void* context) {
  if (done == nullptr) return {};
  return [queue, done, context](const Error* failure, std::span<const std::shared_ptr<Work>> works) {
    std::vector<mr_work> handles;
    handles.reserve(works.size());
    std::vector<mr_work*> pointers;
    for (const auto& work : works) pointers.push_back(&handles.emplace_back(work));
    if (failure == nullptr) {
      done(context, nullptr, pointers.data());
    } else {
      const mr_error error = reported(*queue, *failure);
      done(context, &error, pointers.data());
    }
  };
}

/// What fails on a device breaks the queue on all ranks, but for what the caller has asked for wrongly.
template <class Body>
void on_device(mr_queue* queue, const Body& body) {
  std::shared_ptr<NamedQueue> target;
  try {
    target = queue->get();
  } catch (const Error&) {  // closed: there is nothing to break
  }
  try {
    body();
  } catch (const DeviceError& failure) {
    ErrorContext context;
    context.rank = queue->rank();
    context.host = queue->host();
    const Error named(failure.kind(), "rank " + std::to_string(context.rank) + ": " + failure.what(),
                      context);
    if (target != nullptr && failure.kind() != ErrorKind::kUsage) target->abort(named);
    throw named;
  }
}

/// Returns when the array is in `to`, or raises when the seconds are over.
void read(const std::shared_ptr<Devices>& devices, const Buffer& array, void* to, double seconds) {
  const Deadline deadline = Deadline::after(seconds);
  Staging(devices).read(array, to, [&] {
    if (deadline.expired())
      throw DeviceError(ErrorKind::kTimeout,
                        "waited " + seconds_text(deadline.elapsed()) +
                            " for the device to finish the work that makes the array. Does a kernel of the "
                            "program never end? MULTIRING_TIMEOUT sets how long to wait");
  });
}

}  // namespace
}  // namespace multiring

using multiring::Error;
using multiring::ErrorKind;
using multiring::guarded;

int mr_queue_rank(const mr_queue* queue) { return queue->rank(); }
int mr_queue_size(const mr_queue* queue) { return queue->size(); }

mr_status mr_queue_submit(mr_queue* queue, const mr_submission* submission, mr_error* error) {
  return guarded(queue, error, [&] {
    if (submission->struct_size != sizeof(mr_submission))
      multiring::refuse("mr_submission of another version: initialise it with MR_SUBMISSION_INIT");
    if (submission->name == nullptr || submission->count < 1)
      multiring::refuse("a named submission needs a name and operations");
    multiring::ProgramCalls::note_thread();
    const std::shared_ptr<multiring::NamedQueue> target = queue->get();
    multiring::NamedRequest request;
    request.name = submission->name;
    request.priority = submission->priority;
    request.step = submission->step;
    request.position = submission->position;
    request.done = multiring::calling(queue, submission->done, submission->context);
    multiring::on_device(queue, [&] {
      for (int i = 0; i < submission->count; ++i)
        request.operations.push_back(multiring::convert(submission->operations[i], queue->size()));
    });
    target->submit(std::move(request));
  });
}

int mr_queue_is_broken(const mr_queue* queue) { return static_cast<int>(queue->is_broken()); }

void mr_queue_abort(mr_queue* queue, const char* message) {
  guarded(queue, nullptr, [&] { queue->get()->abort(Error(ErrorKind::kAborted, message)); });
}

void mr_queue_keep(mr_queue* queue, mr_error* error, const char* more) {
  if (error->rank < 0) error->rank = queue->rank();
  if (error->host[0] == '\0') multiring::copy_cut(error->host, queue->host());
  const int64_t number = std::exchange(error->number, 0);
  guarded(queue, nullptr, [&] {
    const Error given = queue->kept(number).value_or(multiring::convert(*error));  // not cut, if it is kept
    const std::string text = given.what() + std::string(more != nullptr ? more : "");
    multiring::copy_cut(error->message, text);
    error->number = queue->keep(Error(given.kind(), text, given.context()));
  });
}

mr_status mr_device_copy(mr_queue* queue, void* to, const void* from, size_t bytes, void* stream,
                         mr_error* error) {
  if (bytes == 0) return MR_OK;
  return guarded(queue, error, [&] {
    multiring::on_device(queue, [&] {
      multiring::Devices& devices = *multiring::Devices::require();
      devices.copy(multiring::locate(devices, to, bytes, stream), static_cast<const std::byte*>(from));
    });
  });
}

mr_status mr_device_read(mr_queue* queue, void* to, const void* from, size_t bytes, void* stream,
                         mr_error* error) {
  if (bytes == 0) return MR_OK;
  return guarded(queue, error, [&] {
    multiring::on_device(queue, [&] {
      const std::shared_ptr<multiring::Devices> devices = multiring::Devices::require();
      multiring::read(devices, multiring::locate(*devices, from, bytes, stream), to, queue->get()->timeout());
    });
  });
}

const void* mr_work_result(const mr_work* work, size_t* bytes, uint64_t* rows) {
  const multiring::Operation& operation = work->work->operation();
  if (bytes != nullptr) *bytes = operation.result.bytes();
  if (rows != nullptr) std::copy(operation.received.begin(), operation.received.end(), rows);
  return operation.result.data();
}

void mr_error_set_message(mr_error* error, const char* message) {
  multiring::copy_cut(error->message, message);
}

void mr_error_text(const mr_error* error, char* text, size_t room) {
  const bool known = error->status > MR_OK && error->status <= MR_INTERNAL;
  const auto kind = known ? static_cast<ErrorKind>(error->status) : ErrorKind::kInternal;
  const std::string number = error->number > 0 ? " error " + std::to_string(error->number) : "";
  std::snprintf(text, room, "multiring%s: %s: %s", number.c_str(), multiring::error_class_name(kind),
                error->message);
}

int mr_status_code(mr_status status) {
  constexpr int kInternal = 13;
  static constexpr int kCodes[] = {0, 3, 9, 4, 14, 10, kInternal};  // in the order of mr_status
  const auto index = static_cast<std::size_t>(status);
  return index < std::size(kCodes) ? kCodes[index] : kInternal;
}

mr_output mr_output_of(mr_kind kind) {
  return static_cast<mr_output>(multiring::traits_of(static_cast<multiring::OpKind>(kind)).output);
}

uint64_t mr_checksum(const void* data, size_t bytes, uint64_t seed) {
  return multiring::checksum(data, bytes, seed);
}
