#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "transport/network.h"

namespace multiring::testing {

/// Messages that a rank has posted to ranks of other hosts.
struct Sent {
  std::size_t messages = 0;
  std::size_t bytes = 0;

  Sent operator-(const Sent& before) const { return {messages - before.messages, bytes - before.bytes}; }
};

/// What a rank has sent so far by all its networks of one kind.
class SentCounter {
 public:
  /// `channels`: of each network, those from there on do not count.
  explicit SentCounter(int channels = std::numeric_limits<int>::max()) : channels_(channels) {}

  void count(int channel, std::size_t bytes) {
    if (channel >= channels_) return;
    messages_ += 1;
    bytes_ += bytes;
  }
  Sent read() const { return {messages_, bytes_}; }
  /// From here on these networks fail when they send aborts or ask for them.
  void fail() { failing_ = true; }
  bool failing() const { return failing_; }
  /// From here on these networks send, but no message is done: the rank learns of aborts only.
  void withhold() { withholding_ = true; }
  bool withholding() const { return withholding_; }

 private:
  const int channels_;
  std::atomic<std::size_t> messages_{0};
  std::atomic<std::size_t> bytes_{0};
  std::atomic<bool> failing_{false};
  std::atomic<bool> withholding_{false};
};

/// By what carries it: the messages of plans, and what is published in rounds; there without the gossip of
/// ranks that wait long, which is chance.
struct SentCounters {
  SentCounter plans;
  SentCounter rounds{1};
  SentCounter messages;

  /// The one of a network that a ClusterTransport has made under this name.
  SentCounter& of(const std::string& name);
};

/// The given network, with what is sent on it counted. Connections with peers that `may_connect` says no to
/// fail the test; null: none does.
std::unique_ptr<Network> counted(std::unique_ptr<Network> network, SentCounter& counter,
                                 std::function<bool(int peer)> may_connect = nullptr);

}  // namespace multiring::testing
