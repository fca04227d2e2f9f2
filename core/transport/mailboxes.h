#pragma once

#include <cstddef>
#include <cstdint>

#include "base/export.h"
#include "transport/any_source.h"
#include "transport/waiting.h"

namespace multiring {

/// Point-to-point messages, independent of the rounds: a mailbox for each ordered pair of ranks, a queue of
/// chunks that the source fills and the destination empties. Chunks of a pair are numbered 1, 2, 3, ...;
/// chunk c is in slot c % kMailboxChunks. Any thread.
class MULTIRING_API Mailboxes {
 public:
  static constexpr std::size_t kMailboxChunks = 2;

  virtual std::size_t mailbox_chunk_bytes() const = 0;
  /// Header (Rounds::kUserHeaderBytes) and payload (mailbox_chunk_bytes) of the slot of a chunk.
  virtual std::byte* mailbox_header(int source, int destination, std::uint64_t chunk) const = 0;
  virtual std::byte* mailbox_payload(int source, int destination, std::uint64_t chunk) const = 0;
  /// `bytes`: of the payload.
  virtual void mailbox_written(int destination, std::uint64_t chunk, std::size_t bytes) = 0;
  virtual void mailbox_read(int source, std::uint64_t chunk) = 0;
  /// Whether chunk `chunk` of `source` has arrived. Does not wait, and may be called during another wait.
  virtual bool has_written(int source, std::uint64_t chunk) const = 0;
  virtual WaitResult await_written(int source, std::uint64_t chunk, const WaitOptions& waiting) = 0;
  /// Waits until `any.ready()`, which a chunk of one of its sources, or a thread that calls `wake` or
  /// `wake_receives`, may make true.
  virtual WaitResult await_any(AnySource& any, const WaitOptions& waiting) = 0;
  virtual void wake_receives() = 0;
  /// Waits until chunk `chunk` (0: none) sent to `destination` has been read.
  virtual WaitResult await_read(int destination, std::uint64_t chunk, const WaitOptions& waiting) = 0;

  /// Waits until what was written for `destination` has left, so that it arrives without further calls.
  virtual WaitResult await_sent(int destination, const WaitOptions& waiting) = 0;

 protected:
  ~Mailboxes() = default;
};

}  // namespace multiring
