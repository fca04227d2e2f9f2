#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/immovable.h"
#include "collective/exchange.h"
#include "collective/staged/staged_copy.h"
#include "transport/hierarchy.h"

namespace multiring {

/// Synchronises the ranks of this host in the middle of an operation. Raises an error where the wait fails.
void synchronise_host(const RoundExchange& exchange, const OperationCall& call, Hierarchy& hierarchy);

/// A ring of slots for messages between hosts. Messages are posted from it and not from the caller's arrays,
/// which a network might write to after an operation has failed.
class MessageRing : Immovable {
 public:
  /// `segment`: most bytes of a message.
  MessageRing(Exchange& exchange, const OperationCall& call, Hierarchy& hierarchy, std::size_t segment);
  ~MessageRing();

  std::size_t segment() const { return segment_; }
  /// Messages in flight at once in each direction: what was posted so many posts ago is complete.
  std::size_t slots() const { return slots_.size(); }
  void connect(std::span<const int> peers);
  /// Completes the next slot and posts in it: `out`, a segment at most, goes to `to`, and `in` is for what
  /// comes from `from`. Either may be empty.
  void post(int to, std::span<const std::byte> out, int from, std::span<std::byte> in);
  /// Completes all slots.
  void finish();

 private:
  struct Slot {
    Hierarchy::Ticket sent = 0;
    Hierarchy::Ticket received = 0;
    int to = -1;
    int from = -1;
    std::span<std::byte> in;
    std::byte* memory = nullptr;  ///< of what is sent; what is received follows it
  };
  void complete(Slot& slot);
  void wait(Hierarchy::Ticket& ticket, int peer);

  Exchange& exchange_;
  const OperationCall& call_;
  Hierarchy& hierarchy_;
  const std::size_t segment_;
  WaitOptions waiting_;
  std::shared_ptr<std::vector<std::byte>> memory_;
  std::vector<Slot> slots_;
  std::size_t next_ = 0;
};

/// Moves to every rank what each has for it: between hosts by messages, within a host through its memory.
///
/// In step i every rank sends to the i-th rank after it and receives from the i-th before it. All ranks take
/// steps and segments in the same order, which avoids deadlocks.
class ClusterCopy {
 public:
  /// `outgoing`, `incoming`: for each rank, as StagedCopy's.
  ClusterCopy(Exchange& exchange, const OperationCall& call, std::span<const StagedCopy::Outgoing> outgoing,
              std::span<const StagedCopy::Incoming> incoming);

  /// `longest`: bytes of the longest piece between two ranks of this host, the same on all of them.
  void run(std::size_t longest);

 private:
  bool is_here(int rank) const;
  void exchange_with(MessageRing& ring, int to, int from);
  void copy_within_host(std::size_t longest);

  Exchange& exchange_;
  const OperationCall& call_;
  Hierarchy& hierarchy_;
  const std::span<const int> local_ranks_;
  std::span<const StagedCopy::Outgoing> outgoing_;
  std::span<const StagedCopy::Incoming> incoming_;
};

}  // namespace multiring
