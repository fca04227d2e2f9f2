#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/export.h"
#include "transport/waiting.h"

namespace multiring {

/// The ranks that keep a rank waiting for a round, as far as it knows; not those that only wait themselves.
struct Stragglers {
  std::vector<int> late;        ///< not known to have reached the round
  std::vector<int> unknown;     ///< nothing is known of them: their data comes through late ones
  std::vector<int> forwarding;  ///< have reached the round, but not forwarded data; they may wait themselves
};

/// Ranks advance through numbered *rounds*, 1, 2, 3, ...: each writes its header and staging memory of the
/// round, calls `arrive`, and after `await_all` reads what the others wrote. Header and staging are double
/// buffered by the round's parity, and a rank arrives at round r + 1 only when it has finished reading round
/// r. So the memory of round r may be written again in round r + 2. One thread of a rank at a time drives the
/// rounds.
class MULTIRING_API Rounds {
 public:
  static constexpr std::size_t kHeaderBytes = 512;
  /// The rest of a header belongs to the transport.
  static constexpr std::size_t kUserHeaderBytes = 496;

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

 protected:
  ~Rounds() = default;
};

}  // namespace multiring
