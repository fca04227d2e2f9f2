#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "collective/exchange.h"
#include "collective/staged/copy.h"
#include "transport/hierarchy.h"

namespace multiring {

/// Whether so many bytes are worth messages of their own between hosts, in pieces of up to `piece`. In rounds
/// everything goes to every host, wanted there or not; but a message to each rank takes a connection and a
/// time of its own.
bool worth_messages(const Transport& transport, std::size_t bytes, std::size_t piece);

/// Meets the other ranks of this host in the middle of an operation. Raises what ends the wait instead.
void meet_mates(const Exchange& exchange, const Call& call, Hierarchy& hierarchy);

/// Messages that take turns in one piece of memory, each in segments: the ring of a rank that sends and
/// receives between hosts. What is posted lies there and not in the caller's arrays, which a network might
/// write to after an operation has failed.
class MessageRing {
 public:
  /// `segment`: most bytes of a message.
  MessageRing(Exchange& exchange, const Call& call, Hierarchy& hierarchy, std::size_t segment);
  ~MessageRing();
  MessageRing(const MessageRing&) = delete;
  MessageRing& operator=(const MessageRing&) = delete;

  std::size_t segment() const { return segment_; }
  /// Messages each way that may be on their way at once: what was posted so many posts ago has landed.
  std::size_t places() const { return places_.size(); }
  void connect(std::span<const int> peers);
  /// Posts what has the next place in the ring, when what was there has landed: `out` of a segment at most
  /// goes to `to`, and `in` is for what comes from `from`. Either may be empty.
  void post(int to, std::span<const std::byte> out, int from, std::span<std::byte> in);
  /// Waits until everything has landed.
  void finish();

 private:
  struct Place {
    Hierarchy::Ticket sent = 0;
    Hierarchy::Ticket received = 0;
    int to = -1;
    int from = -1;
    std::span<std::byte> in;
    std::byte* memory = nullptr;  ///< of what is sent; what is received lies behind it
  };
  void land(Place& place);
  void wait(Hierarchy::Ticket& ticket, int peer);

  Exchange& exchange_;
  const Call& call_;
  Hierarchy& hierarchy_;
  const std::size_t segment_;
  Waiting waiting_;
  std::shared_ptr<std::vector<std::byte>> memory_;
  std::vector<Place> places_;
  std::size_t next_ = 0;
};

/// Moves to every rank what each has for it: between hosts by messages from rank to rank, within a host
/// through its memory.
///
/// In step i every rank sends to the i-th rank after it and receives from the i-th before it. The messages of
/// all steps follow each other in the ring; every rank takes them in the same order of steps and segments, so
/// of two that wait for each other's, the one that is behind always finds its message posted.
class ClusterCopy {
 public:
  /// `outgoing`, `incoming`: for each rank, as StagedCopy's.
  ClusterCopy(Exchange& exchange, const Call& call, std::span<const StagedCopy::Outgoing> outgoing,
              std::span<const StagedCopy::Incoming> incoming);

  /// `longest`: bytes of the longest piece between two ranks of this host, the same on all of them.
  void run(std::size_t longest);

 private:
  bool is_here(int rank) const;
  void exchange_with(MessageRing& ring, int to, int from);
  void copy_within_host(std::size_t longest);

  Exchange& exchange_;
  const Call& call_;
  Hierarchy& hierarchy_;
  const std::span<const int> mates_;
  std::span<const StagedCopy::Outgoing> outgoing_;
  std::span<const StagedCopy::Incoming> incoming_;
};

}  // namespace multiring
