#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/communicator.h"
#include "support/threads.h"
#include "transport/transport.h"

namespace multiring::testing {

/// Expects an error of `kind`.
void expect_kind(const Error& error, ErrorKind kind);
/// Expects `fragment` in the message.
void expect_text(const std::string& text, const std::string& fragment);
void expect_text(const Error& error, const std::string& fragment);
/// Notes a failure of the test: nothing was raised.
Error nothing_raised();

/// The error that `body` raises; expects it to be of `kind`, with all `fragments` in its message.
template <class Body, class... Fragments>
Error error_of(ErrorKind kind, const Body& body, const Fragments&... fragments) {
  try {
    body();
  } catch (const Error& error) {
    expect_kind(error, kind);
    (expect_text(error, fragments), ...);
    return error;
  }
  return nothing_raised();
}

/// Expects a usage error.
template <class Body>
void expect_usage(const Body& body, const std::string& fragment) {
  error_of(ErrorKind::kUsage, body, fragment);
}

/// Expects that every rank has raised such an error (RankGroup::outcomes).
template <class... Fragments>
void expect_all_raised(const std::vector<std::optional<Error>>& outcomes, ErrorKind kind,
                       const Fragments&... fragments) {
  for (const auto& outcome : outcomes) {
    ASSERT_TRUE(outcome.has_value());
    expect_kind(*outcome, kind);
    (expect_text(*outcome, fragments), ...);
  }
}

/// The abort that a transport or a network has learned of; expects its kind and whose it is.
template <class Where>
AbortRecord abort_of(const Where& where, ErrorKind kind, int origin) {
  AbortRecord record;
  EXPECT_TRUE(where.aborted(&record));
  EXPECT_STREQ(error_kind_name(record.kind), error_kind_name(kind)) << record.message;
  EXPECT_EQ(record.origin, origin);
  return record;
}

/// Expects that a wait ended with the loss of `peer`, which had left or had not; empty: one or the other.
void expect_lost(const WaitResult& result, int peer, std::optional<bool> left = {});

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
