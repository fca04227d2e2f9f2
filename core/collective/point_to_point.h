#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/export.h"
#include "collective/exchange.h"
#include "collective/operation.h"

namespace multiring {

/// Messages between two ranks, through the mailbox of the pair. Messages of a pair arrive in the order in
/// which they were sent; the tag is compared, not searched for. A send returns when at most the last two
/// chunks (128 KiB) are unread: at once for a short message to an empty mailbox.
class PointToPoint {
 public:
  explicit PointToPoint(Exchange& exchange);

  /// key.root is the destination, key.count the elements, `tag` any number.
  void send(const OperationCall& call, const Operation& operation, std::int64_t tag);
  /// While a send to `peer` waits: the reason for a deadlock, where `peer` sends to this rank as well and no
  /// thread of this rank receives from it; else empty.
  std::string describe_mutual_send(int peer);
  /// key.root is the source. With `operation.output` null takes dtype and shape from the message and
  /// allocates the result, else raises a mismatch error unless dtype and count are as expected.
  void receive(const OperationCall& call, Operation& operation, std::int64_t tag);

 private:
  struct Envelope;
  /// One direction of a pair's mailbox: one message at a time.
  struct MailboxState {
    std::mutex mutex;  // guards busy; no other lock is taken while it is held
    std::condition_variable idle;
    bool busy = false;
    std::thread::id owner;
    std::uint64_t chunks = 0;  // of the thread that made it busy
  };
  class MailboxLock;

  [[noreturn]] void throw_unsent(const OperationCall& call, const WaitResult& result, int destination);
  void accept(const OperationCall& call, Operation& operation, const Envelope& envelope,
              std::int64_t tag) const;

  Exchange& exchange_;
  std::vector<MailboxState> sent_;
  std::vector<MailboxState> received_;
};

}  // namespace multiring
