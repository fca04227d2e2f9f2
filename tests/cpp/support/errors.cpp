#include "support/errors.h"

#include <chrono>
#include <thread>

#include "support/operations.h"

namespace multiring::testing {

void expect_kind(const Error& error, ErrorKind kind) {
  EXPECT_STREQ(error_kind_name(error.kind()), error_kind_name(kind)) << error.what();
}

void expect_text(const std::string& text, const std::string& fragment) {
  EXPECT_NE(text.find(fragment), std::string::npos) << "no '" << fragment << "' in: " << text;
}
void expect_text(const Error& error, const std::string& fragment) {
  expect_text(std::string(error.what()), fragment);
}

Error nothing_raised() {
  ADD_FAILURE() << "nothing was raised";
  return Error(ErrorKind::kInternal, "");
}

void expect_lost(const WaitResult& result, int peer, std::optional<bool> left) {
  EXPECT_EQ(result.outcome, WaitResult::Outcome::kPeerLost);
  EXPECT_EQ(result.peer, peer);
  EXPECT_EQ(result.peer_left, left.value_or(result.peer_left));
}

void run_barrier(Communicator& communicator, const CallOptions& options) {
  run(communicator, barrier_operation(), options);
}

void await_broken(Communicator& communicator) {
  while (!communicator.is_broken()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

Warnings::Warnings(CommunicatorOptions& options, double seconds) {
  options.stall_warning = seconds;
  options.warn = [this](const std::string& text) {
    const std::lock_guard lock(mutex_);
    texts.push_back(text);
    first_.count_down();
  };
}

Pending::Pending(Communicator& communicator) : arrays_(20, std::vector<float>(3000, 1.0f)) {
  for (auto& array : arrays_) {
    try {
      works_.push_back(communicator.submit(sum_in_place(array, "pending"), 0, nullptr));
    } catch (const Error&) {
      if (works_.empty()) throw;
      break;  // the first ones have failed already
    }
  }
}

void Pending::expect_all(ErrorKind kind, const std::string& fragment) {
  for (const auto& work : works_) {
    for (int repeat = 0; repeat < 2; ++repeat)
      expect_text(error_of(kind, [&] { work->wait(Deadline::never(), {}); }), fragment);
    EXPECT_TRUE(work->done());
  }
}

}  // namespace multiring::testing
