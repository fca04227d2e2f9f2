#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/export.h"

namespace multiring {

/// How a blocking call waits: until when, and what else may end it.
struct Waiting {
  Deadline deadline = Deadline::never();
  /// Called every few tens of milliseconds from the waiting thread; may throw (Ctrl-C). May be null.
  const std::function<void()>* interrupt = nullptr;
  /// Called once when the wait has lasted `stall_after` seconds (0: never). May be null.
  const std::function<void(double waited)>* stalled = nullptr;
  double stall_after = 0.0;
  /// Ends the wait when set (the communicator is being closed). May be null.
  const std::atomic<bool>* cancelled = nullptr;
  /// The peers are at it already: sleeping and being woken takes longer than they will.
  bool brief = false;

  void check_interrupt() const {
    if (interrupt != nullptr && *interrupt) (*interrupt)();
  }
};

/// Why a wait ended.
struct WaitResult {
  enum class Outcome : std::uint8_t { kArrived, kTimeout, kPeerLost, kAborted, kCancelled };
  Outcome outcome = Outcome::kArrived;
  int peer = -1;           ///< kPeerLost: who
  bool peer_left = false;  ///< kPeerLost: it said goodbye (shutdown or exit) rather than died
  bool peer_gone =
      false;  ///< kPeerLost: nothing answers at its address; whether it left or died is not known
  bool ok() const { return outcome == Outcome::kArrived; }
};

/// Raised by what waits in several steps (`subgroup`, `allocate`) where a wait would have ended so.
struct WaitEnded {
  WaitResult result;
};

/// The first error of a transport's ranks, as all of them can read it.
struct AbortRecord {
  ErrorKind kind = ErrorKind::kAborted;
  int origin = -1;
  std::string message;
};

/// Who keeps a rank waiting for a round, as far as it knows. Ranks that only wait for others themselves are
/// not among them; ranks ascend.
struct Missing {
  std::vector<int> late;     ///< they are not known to have come
  std::vector<int> behind;   ///< nor are these, whose messages come through others that have not come
  std::vector<int> holding;  ///< they have come, but not what they were to pass on; they may wait themselves
};

class Hierarchy;

/// Memory that every rank of a host has mapped: one part of `bytes_per_rank` for each rank.
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
/// A rank reads what the others have published, and writes only what is its own, unless the ranks
/// *share memory*: then it may write to the others' staging and symmetric memory, too.
///
/// Ranks advance through numbered *rounds*, 1, 2, 3, ...: each writes its header and staging memory of the
/// round, calls `arrive`, and after `await_all` reads what the others wrote. Header and staging are double
/// buffered by the round's parity, and a rank arrives at round r + 1 only when it has read all it wants of
/// round r; so the memory of round r may be written again in round r + 2 without another synchronisation.
/// One thread of a rank at a time drives the rounds.
///
/// *Mailboxes* carry point-to-point messages: one per ordered pair of ranks, each a queue of chunks that the
/// source fills and the destination empties, independent of the rounds.
class MULTIRING_API Transport {
 public:
  static constexpr std::size_t kHeaderBytes = 512;
  /// The rest of a header is the transport's own.
  static constexpr std::size_t kUserHeaderBytes = 496;
  static constexpr std::size_t kMailboxChunks = 2;

  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Name of the host of `rank` and its process id, for messages.
  virtual std::string host(int rank) const = 0;
  virtual std::int64_t process_id(int rank) const = 0;
  /// The number of `rank` in the world, which users know it by.
  virtual int world_rank(int rank) const = 0;
  /// Equal for ranks that share memory with each other.
  virtual int host_number(int rank) const = 0;

  /// Whether ranks outnumber the cores that they may run on: then a wait should leave its core to others. The
  /// same on all ranks.
  virtual bool crowded() const = 0;
  /// Whether all ranks see the same memory, so that what one writes into another's is there. The same on all.
  virtual bool shares_memory() const = 0;

  // Rounds.
  virtual std::byte* header(int rank, std::uint64_t round) const = 0;
  virtual std::byte* staging(int rank, std::uint64_t round) const = 0;
  /// Bytes of staging memory of one rank in one round.
  virtual std::size_t staging_bytes() const = 0;
  /// `staged`: bytes of its staging memory, from the first on, that this rank has to say something in.
  virtual void arrive(std::uint64_t round, std::size_t staged) = 0;
  virtual WaitResult await_all(std::uint64_t round, const Waiting& waiting) = 0;
  /// The last round at which `rank` has arrived.
  virtual std::uint64_t arrived(int rank) const = 0;
  /// Whether `rank` is known to have come to `round`. What it has published may not be here yet.
  virtual bool has_come(int rank, std::uint64_t round) const = 0;
  virtual Missing missing(std::uint64_t round) const = 0;
  /// Whether the end of `rank` would be noticed by a rank of this host.
  virtual bool is_watched(int rank) const = 0;

  // Mailboxes. Chunks of a pair are numbered 1, 2, 3, ...; chunk c lies in the place c % kMailboxChunks.
  virtual std::size_t mailbox_chunk_bytes() const = 0;
  /// Header (kUserHeaderBytes) and payload (mailbox_chunk_bytes) of a place in a pair's mailbox.
  virtual std::byte* mailbox_header(int source, int destination, std::uint64_t chunk) const = 0;
  virtual std::byte* mailbox_payload(int source, int destination, std::uint64_t chunk) const = 0;
  /// `bytes`: of the payload.
  virtual void mailbox_written(int destination, std::uint64_t chunk, std::size_t bytes) = 0;
  virtual void mailbox_read(int source, std::uint64_t chunk) = 0;
  /// Whether chunk `chunk` of `source` is here. Does not wait, so that it may be asked while another wait
  /// goes on.
  virtual bool has_written(int source, std::uint64_t chunk) const = 0;
  virtual WaitResult await_written(int source, std::uint64_t chunk, const Waiting& waiting) = 0;
  /// Waits until chunk `chunk` (0: none) sent to `destination` has been read.
  virtual WaitResult await_read(int destination, std::uint64_t chunk, const Waiting& waiting) = 0;

  /// Waits until what was written for `destination` is on its way, so that this rank may turn to other
  /// things.
  virtual WaitResult await_sent(int destination, const Waiting& waiting) = 0;

  /// How ranks on several hosts reach each other directly; null where all share memory.
  virtual Hierarchy* hierarchy() { return nullptr; }

  /// Memory that all ranks of a host have mapped. Collective; every rank passes the same `bytes_per_rank` and
  /// `id`.
  virtual std::shared_ptr<SymmetricRegion> allocate(std::size_t bytes_per_rank, std::uint32_t id,
                                                    const Waiting& waiting) = 0;
  /// A transport among `members` (ranks of this one, in their new order, this rank among them). Collective
  /// among the members; `tag` is the same on all members and never used twice. Raises WaitEnded, too.
  virtual std::shared_ptr<Transport> subgroup(std::span<const int> members, std::uint64_t tag,
                                              const Waiting& waiting) = 0;

  /// Tells all ranks of an error: their waits end. The first one wins. Does what it can where telling fails.
  virtual void abort(ErrorKind kind, const std::string& message) noexcept = 0;
  /// The first error any rank told of; false if there is none.
  virtual bool aborted(AbortRecord* record) const = 0;
  /// Says goodbye: peers that still wait for this rank learn that it left. Idempotent.
  virtual void leave() = 0;
  /// This process is a fork of the rank's: lets go of what would keep peers from noticing the rank's end, and
  /// never says goodbye in its name. Async-signal-safe apart from closing descriptors; takes no lock.
  virtual void abandon() = 0;
  /// Wakes this process's own waits so that they look at `Waiting::cancelled`.
  virtual void wake() = 0;
};

}  // namespace multiring
