#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "engine/communicator.h"
#include "engine/named_queue.h"
#include "multiring.h"

struct mr_communicator {
  explicit mr_communicator(std::shared_ptr<multiring::Communicator> group) : communicator(std::move(group)) {}

  std::shared_ptr<multiring::Communicator> communicator;
  std::mutex mutex;                                          // guards queues
  std::vector<std::weak_ptr<multiring::NamedQueue>> queues;  // end with the communicator
};

struct mr_work {
  std::shared_ptr<multiring::Work> work;  // empty after mr_run, which has filled `finished`
  multiring::Operation finished;
  const multiring::Operation& operation() const { return work != nullptr ? work->operation() : finished; }
};

namespace multiring {

/// Fills *error (unless that is null) and returns its status.
mr_status report(mr_error* error, ErrorKind kind, const char* message, const ErrorContext& context);
[[noreturn]] void refuse(const std::string& message);
/// Raises a usage error for an invalid operation.
Operation convert(const mr_operation& asked, int size);

/// No exception leaves the C ABI.
template <class Body>
mr_status guarded(mr_error* error, const Body& body) {
  try {
    body();
    return MR_OK;
  } catch (const Error& failure) {
    return report(error, failure.kind(), failure.what(), failure.context());
  } catch (const std::exception& failure) {
    return report(error, ErrorKind::kInternal, failure.what(), {});
  } catch (...) {
    return report(error, ErrorKind::kInternal, "unknown error", {});
  }
}

}  // namespace multiring
