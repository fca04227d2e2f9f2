#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/export.h"
#include "transport/network.h"
#include "transport/transport.h"

namespace multiring {

/// How ranks on several hosts reach each other directly, without the rounds of all: those of a host meet in
/// rounds of their own, over their memory, and any two ranks of different hosts send each other messages.
///
/// Ranks are those of the group. All waits end with what ends the waits of the group, too. For the thread
/// that drives the group's rounds.
class MULTIRING_API Hierarchy {
 public:
  using Ticket = Network::Ticket;

  virtual ~Hierarchy() = default;

  /// The ranks of this host by their places in `host`, ascending.
  virtual std::span<const int> host_ranks() const = 0;
  /// Memory of a rank of this host, by its place, for the round that `meet` comes to next.
  virtual std::byte* staging(int place) const = 0;
  virtual std::size_t staging_bytes() const = 0;
  /// Comes to the next round of this host and waits for its other ranks. What they staged can be read by
  /// `staged` until the next call.
  virtual WaitResult meet(const Waiting& waiting) = 0;
  virtual const std::byte* staged(int place) const = 0;

  /// Makes messages with these ranks of other hosts possible, and costs nothing where they are already. They
  /// have to do the same. Raises what is in the way.
  virtual WaitResult connect(std::span<const int> peers, const Waiting& waiting) = 0;
  /// As those of Network.
  virtual Ticket post_send(int peer, std::span<const std::span<const std::byte>> parts) = 0;
  virtual Ticket post_receive(int peer, std::span<std::byte> buffer) = 0;
  virtual WaitResult wait(std::span<const Ticket> tickets, const Waiting& waiting) = 0;
  virtual bool done(Ticket ticket) const = 0;
  virtual void give_up(std::span<const Ticket> tickets) = 0;
  virtual void keep(std::shared_ptr<const void> memory) = 0;
};

}  // namespace multiring
