#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/communicator.h"
#include "support/latch.h"

namespace multiring::testing {

/// Expects an error of `kind`.
void expect_kind(const Error& error, ErrorKind kind);
/// Expects `fragment` in the message.
void expect_text(const Error& error, const std::string& fragment);
/// Notes a failure of the test: nothing was raised.
Error nothing_raised();

/// The error that `body` raises; expects it to be of `kind`.
template <class Body>
Error error_of(ErrorKind kind, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    expect_kind(error, kind);
    return error;
  }
  return nothing_raised();
}

/// Expects a usage error with `fragment` in its message.
template <class Body>
void expect_usage(const Body& body, const std::string& fragment) {
  expect_text(error_of(ErrorKind::kUsage, body), fragment);
}

void run_barrier(Communicator& communicator, const CallOptions& options = {});
/// Returns when this rank knows that the communicator is broken.
void await_broken(Communicator& communicator);

/// The warnings of communicators whose operations wait.
class Warnings {
 public:
  /// From now on communicators with `options` warn into this after `seconds`.
  Warnings(CommunicatorOptions& options, double seconds);
  void await_first() { first_.wait(); }

  std::vector<std::string> texts;  ///< to be read when the ranks have ended

 private:
  std::mutex mutex_;  // guards texts
  Latch first_{1};
};

/// Twenty asynchronous allreduces 'pending' of several segments of kSmallStaging, that not all ranks submit.
class Pending {
 public:
  explicit Pending(Communicator& communicator);
  /// Waits for all, twice for each, and expects the same error every time.
  void expect_all(ErrorKind kind, const std::string& fragment);
  Work& first() { return *works_.front(); }
  Work& last() { return *works_.back(); }

 private:
  std::vector<std::vector<float>> arrays_;
  std::vector<std::shared_ptr<Work>> works_;
};

}  // namespace multiring::testing
