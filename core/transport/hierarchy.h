#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/export.h"
#include "transport/network.h"
#include "transport/waiting.h"

namespace multiring {

/// Bytes of staging memory of a rank there, for those of the group's rounds: messages are sent in pieces of
/// it, which should not be small.
constexpr std::size_t hierarchy_staging_bytes(std::size_t staging_bytes) {
  constexpr std::size_t kFactor = 4;
  constexpr std::size_t kMax = std::size_t{2} << 20;
  return std::min(staging_bytes * kFactor, kMax);
}

/// Communication of ranks on several hosts without the rounds of the whole group: the ranks of a host have
/// rounds of their own in shared memory, and ranks of different hosts exchange messages.
///
/// Ranks are those of the group, whose errors end waits here, too. For the thread that drives its rounds.
class MULTIRING_API Hierarchy {
 public:
  using Ticket = Network::Ticket;

  virtual ~Hierarchy() = default;

  /// The ranks of this host, ascending. The position of a rank is its local index.
  virtual std::span<const int> host_ranks() const = 0;
  /// Memory of a rank of this host for the next round.
  virtual std::byte* staging(int local) const = 0;
  virtual std::size_t staging_bytes() const = 0;
  /// A round of this host's ranks. `staged` returns what they have staged, until the next call.
  virtual WaitResult synchronise(const WaitOptions& waiting) = 0;
  virtual const std::byte* staged(int local) const = 0;

  /// Connects with these ranks of other hosts, which have to do the same. Raises what prevents it.
  virtual WaitResult connect(std::span<const int> peers, const WaitOptions& waiting) = 0;
  /// As in Network.
  virtual Ticket post_send(int peer, std::span<const std::span<const std::byte>> parts) = 0;
  virtual Ticket post_receive(int peer, std::span<std::byte> buffer) = 0;
  virtual WaitResult wait(std::span<const Ticket> tickets, const WaitOptions& waiting) = 0;
  virtual bool done(Ticket ticket) const = 0;
  virtual void give_up(std::span<const Ticket> tickets) = 0;
  virtual bool outlasts_give_up() const = 0;
  virtual void keep(std::shared_ptr<const void> memory) = 0;
};

}  // namespace multiring
