#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/export.h"

namespace multiring {

/// How a blocking call waits: until when, and what else may end it.
struct WaitOptions {
  Deadline deadline = Deadline::never();
  /// Called every few tens of milliseconds from the waiting thread; may throw (Ctrl-C). May be null.
  const std::function<void()>* interrupt = nullptr;
  /// Called once when the wait has lasted `stall_after` seconds (0: never). May be null.
  const std::function<void(double waited)>* stalled = nullptr;
  double stall_after = 0.0;
  /// Ends the wait when set (the communicator is being closed). May be null.
  const std::atomic<bool>* cancelled = nullptr;
  /// The wait will be shorter than sleeping and waking takes.
  bool brief = false;

  void check_interrupt() const {
    if (interrupt != nullptr && *interrupt) (*interrupt)();
  }
  bool is_cancelled() const { return cancelled != nullptr && cancelled->load(std::memory_order_acquire); }
  /// The same wait with another interrupt. Starts the deadline, which otherwise only the copy would.
  WaitOptions with_interrupt(const std::function<void()>& other) const {
    deadline.start();
    WaitOptions copy = *this;
    copy.interrupt = &other;
    return copy;
  }
};

/// Why a wait ended.
struct WaitResult {
  enum class Outcome : std::uint8_t { kArrived, kTimeout, kPeerLost, kAborted, kCancelled };
  Outcome outcome = Outcome::kArrived;
  int peer = -1;           ///< kPeerLost
  bool peer_left = false;  ///< kPeerLost: it left (shutdown or exit) rather than died
  bool peer_gone = false;  ///< kPeerLost: nothing answers at its address; it may have left or died
  bool ok() const { return outcome == Outcome::kArrived; }
};

/// So often is looked, and at these distances, for the error because of which a rank has left: it may arrive
/// after the goodbye.
inline constexpr int kCauseChecks = 20;
inline constexpr std::chrono::milliseconds kBetweenCauseChecks(10);

/// Raised by calls that wait in several steps (`subgroup`, `allocate`) when one of their waits ends.
struct WaitEnded {
  WaitResult result;
};

/// The first error of a transport's ranks.
struct AbortRecord {
  // Longer ones are cut when they are sent.
  static constexpr std::size_t kOperationBytes = 31;
  static constexpr std::size_t kTensorBytes = 255;

  AbortRecord() = default;
  AbortRecord(ErrorKind what, int rank, std::string text, ErrorContext context = {})
      : kind(what), origin(rank), message(std::move(text)), about(std::move(context)) {}

  ErrorKind kind = ErrorKind::kAborted;
  int origin = -1;
  std::string message;
  ErrorContext about;  ///< common, odd, operation and tensor of the origin's error; nothing else is sent
};

/// The ranks that keep a rank waiting for a round, as far as it knows; not those that only wait themselves.
struct Stragglers {
  std::vector<int> late;        ///< not known to have reached the round
  std::vector<int> unknown;     ///< nothing is known of them: their data comes through late ones
  std::vector<int> forwarding;  ///< have reached the round, but not forwarded data; they may wait themselves
};

class Hierarchy;

/// Memory that all ranks of a host have mapped: a part of `bytes_per_rank` for each rank.
class MULTIRING_API SymmetricRegion {
 public:
  virtual ~SymmetricRegion() = default;
  /// Null: `rank` is on another host.
  virtual std::byte* part(int rank) const = 0;
  virtual std::size_t bytes_per_rank() const = 0;
  /// The same on all ranks.
  virtual std::uint32_t id() const = 0;
};

/// What the collectives need from a group of ranks.
///
/// A rank reads what the others have published, and writes only its own memory, unless the ranks *share
/// memory*: then it may write to the others' staging and symmetric memory, too.
///
/// Ranks advance through numbered *rounds*, 1, 2, 3, ...: each writes its header and staging memory of the
/// round, calls `arrive`, and after `await_all` reads what the others wrote. Header and staging are double
/// buffered by the round's parity, and a rank arrives at round r + 1 only when it has finished reading round
/// r. So the memory of round r may be written again in round r + 2. One thread of a rank at a time drives the
/// rounds.
///
/// *Mailboxes* carry point-to-point messages, independent of the rounds: one per ordered pair of ranks, each
/// a queue of chunks that the source fills and the destination empties.
class MULTIRING_API Transport {
 public:
  static constexpr std::size_t kHeaderBytes = 512;
  /// The rest of a header belongs to the transport.
  static constexpr std::size_t kUserHeaderBytes = 496;
  static constexpr std::size_t kMailboxChunks = 2;

  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Name of the host of `rank` and its process id, for messages.
  virtual std::string host(int rank) const = 0;
  virtual std::int64_t process_id(int rank) const = 0;
  /// The world rank of `rank`, by which users know it.
  virtual int world_rank(int rank) const = 0;
  /// Equal for ranks that share memory with each other.
  virtual int host_number(int rank) const = 0;

  /// Whether messages may go straight from the host of `rank` to that of `other`.
  virtual bool has_link(int /*rank*/, int /*other*/) const { return true; }
  /// Whether that is so for all ranks. The same on all ranks.
  virtual bool fully_linked() const { return true; }

  /// Whether ranks outnumber their cores: then a wait should leave its core to others. The same on all ranks.
  virtual bool oversubscribed() const = 0;
  /// Whether all ranks map the same memory, and may write to each other's. The same on all ranks.
  virtual bool shares_memory() const = 0;

  // Rounds.
  virtual std::byte* header(int rank, std::uint64_t round) const = 0;
  virtual std::byte* staging(int rank, std::uint64_t round) const = 0;
  /// Bytes of staging memory of one rank in one round.
  virtual std::size_t staging_bytes() const = 0;
  /// `staged`: bytes, from the first on, that this rank has written to its staging memory.
  virtual void arrive(std::uint64_t round, std::size_t staged) = 0;
  virtual WaitResult await_all(std::uint64_t round, const WaitOptions& waiting) = 0;
  /// The last round at which `rank` has arrived.
  virtual std::uint64_t arrived(int rank) const = 0;
  /// Whether `rank` is known to have arrived at `round`. What it has published may not be here yet.
  virtual bool has_reached(int rank, std::uint64_t round) const = 0;
  /// Whether `rank` is known to have arrived at a round at which this rank has not.
  virtual bool is_ahead(int rank) const = 0;
  virtual Stragglers stragglers(std::uint64_t round) const = 0;
  /// Whether the end of `rank` would be noticed by a rank of this host.
  virtual bool is_watched(int rank) const = 0;

  // Mailboxes. Chunks of a pair are numbered 1, 2, 3, ...; chunk c is in slot c % kMailboxChunks.
  virtual std::size_t mailbox_chunk_bytes() const = 0;
  /// Header (kUserHeaderBytes) and payload (mailbox_chunk_bytes) of the slot of a chunk.
  virtual std::byte* mailbox_header(int source, int destination, std::uint64_t chunk) const = 0;
  virtual std::byte* mailbox_payload(int source, int destination, std::uint64_t chunk) const = 0;
  /// `bytes`: of the payload.
  virtual void mailbox_written(int destination, std::uint64_t chunk, std::size_t bytes) = 0;
  virtual void mailbox_read(int source, std::uint64_t chunk) = 0;
  /// Whether chunk `chunk` of `source` has arrived. Does not wait, and may be called during another wait.
  virtual bool has_written(int source, std::uint64_t chunk) const = 0;
  virtual WaitResult await_written(int source, std::uint64_t chunk, const WaitOptions& waiting) = 0;
  /// Waits until chunk `chunk` (0: none) sent to `destination` has been read.
  virtual WaitResult await_read(int destination, std::uint64_t chunk, const WaitOptions& waiting) = 0;

  /// Waits until what was written for `destination` has left, so that it arrives without further calls.
  virtual WaitResult await_sent(int destination, const WaitOptions& waiting) = 0;

  /// Null if all ranks share memory.
  virtual Hierarchy* hierarchy() { return nullptr; }

  /// Memory that all ranks of a host have mapped. Collective, with the same arguments on all ranks.
  virtual std::shared_ptr<SymmetricRegion> allocate(std::size_t bytes_per_rank, std::uint32_t id,
                                                    const WaitOptions& waiting) = 0;
  /// A transport among `members`: ranks of this one, including this rank, in their new order. Collective
  /// among the members; `tag` is the same on all members and never used twice. Raises WaitEnded, too.
  /// To be used once it has learned the addresses of all its ranks and `connect_subgroup` has returned.
  virtual std::shared_ptr<Transport> subgroup(std::span<const int> members, std::uint64_t tag,
                                              const WaitOptions& waiting) = 0;
  /// What other hosts need to reach this rank in this transport; empty: nothing.
  virtual std::string addresses() const { return {}; }
  /// Takes what `addresses` returned on each rank.
  virtual void learn_addresses(std::span<const std::string> /*by_rank*/) {}
  /// Connects a subgroup of this transport. Collective among its members. Raises WaitEnded, too.
  virtual void connect_subgroup(Transport& /*subgroup*/, const WaitOptions& /*waiting*/) {}

  /// Ends the waits of all ranks with an error. The first one wins. Best effort if a network fails.
  virtual void abort(const Error& error) noexcept = 0;
  /// The first error of any rank; false if there is none.
  virtual bool aborted(AbortRecord* record) const = 0;
  /// A rank that is known to have ended, preferably one that died.
  virtual WaitResult find_ended() const = 0;
  /// Peers that wait for this rank learn that it left. Idempotent.
  virtual void leave() = 0;
  /// For a fork of the rank's process: releases what would hide the rank's end from peers, and never leaves
  /// in its name. Async-signal-safe apart from closing descriptors; takes no lock.
  virtual void abandon() = 0;
  /// Wakes this process's own waits so that they check `WaitOptions::cancelled`.
  virtual void wake() = 0;
};

}  // namespace multiring
