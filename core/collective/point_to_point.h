#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/export.h"
#include "collective/agreement/round_exchange.h"
#include "collective/operation.h"

namespace multiring {

/// What is known of a message before it is received.
struct MessageInfo {
  int source = -1;
  std::int64_t tag = 0;
  DType dtype = DType::kUInt8;
  std::vector<std::uint64_t> shape;
};

/// Whose messages are waited for.
struct ProbeRequest {
  std::vector<int> sources;  ///< empty: all that can send to this rank
  std::vector<int> needed;   ///< those of them whose leaving is an error though others may send (AnySource)
  /// Ends the wait when set, with Transport::wake. May be null.
  const std::atomic<bool>* stopped = nullptr;
};

/// Messages between two ranks, through the mailbox of the pair. Messages of a pair arrive in the order in
/// which they were sent; the tag is compared, not searched for. A send returns when at most the last two
/// chunks (128 KiB) are unread: at once for a short message to an empty mailbox.
class PointToPoint {
 public:
  explicit PointToPoint(RoundExchange& exchange);

  /// key.root is the destination, key.count the elements, `tag` any number.
  void send(const OperationCall& call, const Operation& operation, std::int64_t tag);
  /// While a send to `peer` waits: the reason for a deadlock, where `peer` sends to this rank as well and no
  /// thread of this rank receives from it; else empty.
  std::string describe_mutual_send(int peer);
  /// Waits for a message that can be received, and tells what it is; of several, those of all sources get
  /// their turn. Each is told once: until it is received, its source is passed over, as by MPI_Mprobe. Empty:
  /// stopped. `sources` are in order, and none is there twice.
  std::optional<MessageInfo> probe(const OperationCall& call, const ProbeRequest& request);
  /// key.root is the source. With `operation.output` null takes dtype and shape from the message and
  /// allocates the result, else raises a mismatch error unless dtype and count are as expected.
  void receive(const OperationCall& call, Operation& operation, std::int64_t tag);

 private:
  struct Envelope;
  /// One direction of a pair's mailbox: one message at a time.
  struct MailboxState {
    std::mutex mutex;  // guards busy and told; no other lock is taken while it is held
    std::condition_variable idle;
    bool busy = false;
    bool told = false;  // a probe has told of the next message
    std::thread::id owner;
    std::uint64_t chunks = 0;  // of the thread that made it busy
  };
  class MailboxLock;

  [[noreturn]] void throw_unsent(const OperationCall& call, const WaitResult& result, int destination);
  std::optional<MessageInfo> next_message(const OperationCall& call, int source);
  /// AnySource's: of one that has left a message that was told can still be received.
  bool is_over(int source, bool left);
  /// "rank 1 has sent a message with tag 9, ...", of messages that were told and not received; or empty.
  std::string describe_told(const std::vector<int>& sources);
  void accept(const OperationCall& call, Operation& operation, const Envelope& envelope,
              std::int64_t tag) const;

  RoundExchange& exchange_;
  std::vector<MailboxState> sent_;
  std::vector<MailboxState> received_;
  std::atomic<int> probing_{0};     // threads
  std::atomic<int> last_told_{-1};  // source
};

}  // namespace multiring
