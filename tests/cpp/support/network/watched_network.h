#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "transport/network.h"

namespace multiring::testing {

/// Messages that a rank has posted to ranks of other hosts.
struct Sent {
  std::size_t messages = 0;
  std::size_t bytes = 0;

  Sent operator-(const Sent& before) const { return {messages - before.messages, bytes - before.bytes}; }
};

/// What a rank has sent so far, by all its networks.
class SentCounter {
 public:
  void count(std::size_t bytes) {
    messages_ += 1;
    bytes_ += bytes;
  }
  Sent read() const { return {messages_, bytes_}; }

 private:
  std::atomic<std::size_t> messages_{0};
  std::atomic<std::size_t> bytes_{0};
};

/// How many messages a rank has sent to each other one.
class PeerCounter {
 public:
  void count(int peer) {
    const std::lock_guard lock(mutex_);
    ++messages_[peer];
  }
  std::map<int, std::size_t> read() const {
    const std::lock_guard lock(mutex_);
    return messages_;
  }

 private:
  mutable std::mutex mutex_;
  std::map<int, std::size_t> messages_;
};

/// The networks of a rank: what they have sent, and how they are disturbed.
struct WatchedNetworks {
  // By channel, without the gossip of ranks that wait long, which is chance.
  SentCounter rounds;
  SentCounter plans;
  SentCounter messages;
  PeerCounter plan_peers;
  /// They fail when they send aborts or ask for them.
  std::atomic<bool> failing{false};
  /// They send, but no message is done: the rank learns of aborts only.
  std::atomic<bool> withholding{false};

  void count(int peer, int channel, std::size_t bytes);
};

/// The given network, watched. Connections with peers that `may_connect` says no to fail the test; null: none
/// does.
std::unique_ptr<Network> watched(std::unique_ptr<Network> network, WatchedNetworks& watch,
                                 std::function<bool(int peer)> may_connect = nullptr);

}  // namespace multiring::testing
