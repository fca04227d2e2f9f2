#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/communicator.h"

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

void run_barrier(Communicator& communicator, const CallOptions& options = {});
/// Returns when this rank knows that the communicator is broken.
void await_broken(Communicator& communicator);

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
