#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/export.h"
#include "transport/abort_record.h"
#include "transport/waiting.h"

namespace multiring {

/// Messages between ranks that share no memory.
///
/// A *stream* is an ordered pair of ranks and a *channel*: its messages arrive in the order in which they
/// were sent, and independently of all other streams. The n-th receive that is posted on a stream takes the
/// n-th message that is sent on it, and both have to be of the same length: otherwise the network is aborted
/// with a mismatch that names both ranks and lengths.
///
/// Posting never blocks. Messages move while their rank waits or calls `progress`: there is no progress
/// thread. A message may be sent before its receive is posted, and any number may be posted in both
/// directions. What its receiver has not posted yet stays with the sender and in the kernel's buffers.
///
/// Any thread may call anything at any time, also from the callbacks of a wait. Threads that wait at the same
/// time make progress for each other. A ticket is for one thread at a time.
class MULTIRING_API Network {
 public:
  /// A message that was posted. Never 0.
  using Ticket = std::uint64_t;
  /// One end of the two streams between this rank and `peer` on `channel`.
  struct Link {
    int peer;
    int channel;
  };

  virtual ~Network() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int channels() const = 0;
  /// Name of the host of `rank`, or else its address, for messages; empty: not known. Does not wait.
  virtual std::string host(int rank) = 0;

  /// How other ranks reach this one; empty: they know. What a network without a store has to `learn` of each
  /// peer before it connects with it.
  virtual std::string address() const { return {}; }
  virtual void learn(int /*rank*/, const std::string& /*address*/) {}

  /// Connects `links`; free for those that are connected. The peers have to do the same: name all links of a
  /// plan in one call, so that ranks do not wait for each other in a cycle. Raises what prevents it and names
  /// both ends: kPeerLost, kTimeout, kUsage (they cannot reach each other, or are of other jobs), kAborted.
  virtual void connect(std::span<const Link> links, const WaitOptions& waiting) = 0;

  /// Whether one end alone can connect a link when it is first needed, by `connect_on_demand`.
  virtual bool links_on_demand() const { return false; }
  /// As connect, but the peers need only make progress. After kTimeout call it again: the attempt goes on.
  virtual WaitResult connect_on_demand(std::span<const Link> links, const WaitOptions& waiting) {
    connect(links, waiting);
    return {};
  }
  /// Whether `link` is connected.
  virtual bool linked(const Link&) const { return true; }
  /// Changes when peers may have connected links. Any thread.
  virtual std::uint64_t links_version() const { return 0; }

  /// Whether a message of `rank` is known to have come whose receive is not posted.
  virtual bool is_ahead(int /*rank*/, int /*channel*/) const { return false; }

  /// kPeerLost if `rank` is known to have left or died.
  virtual WaitResult ended(int /*rank*/) const { return {}; }

  /// Sends the concatenated `parts`. Copies the list; the memory must not change before the message is done.
  virtual Ticket post_send(int peer, int channel, std::span<const std::span<const std::byte>> parts) = 0;
  /// Receives into `buffer`, whose content is undefined before the message is done.
  virtual Ticket post_receive(int peer, int channel, std::span<std::byte> buffer) = 0;

  /// Waits until all messages of `tickets` are done, and releases the tickets. A send is done when its memory
  /// may be changed, not when the peer has the message. After any other outcome all tickets stay valid.
  virtual WaitResult wait(std::span<const Ticket> tickets, const WaitOptions& waiting) = 0;
  /// Waits until one of the messages is done, or cannot be any more (kPeerLost). Releases no ticket.
  virtual WaitResult wait_any(std::span<const Ticket> tickets, const WaitOptions& waiting) = 0;
  /// Whether the message is done. Makes no progress, and does not release the ticket.
  virtual bool done(Ticket ticket) const = 0;
  /// Releases tickets, done or not, and the memory of their messages. If one was not done, both streams of
  /// its link stop: waits for what is pending there raise kInternal, and nothing may be posted.
  virtual void give_up(std::span<const Ticket> tickets) = 0;
  /// Sends and receives what it can without waiting.
  virtual void progress() = 0;
  /// Whether it may access the memory of a message even after `give_up`.
  virtual bool outlasts_give_up() const { return false; }
  /// Memory of messages, for networks that do: they keep it that long.
  virtual void keep(std::shared_ptr<const void>) {}

  /// Propagates an error: the waits of this rank and of all that it is connected with, directly or through
  /// others, end with kAborted. The first error wins. Ranks that are still connecting learn of it later.
  virtual void abort(const Error& error) = 0;
  /// The same for an error from another network.
  virtual void relay(const AbortRecord& record) = 0;
  /// The first error of any rank; false if there is none.
  virtual bool aborted(AbortRecord* record) const = 0;
  /// Peers learn that this rank left rather than died. Messages that were done still arrive.
  /// Nothing can be posted or connected afterwards. Idempotent.
  virtual void leave() = 0;
  /// For a fork of the rank's process: releases what would hide the rank's end from peers, and never leaves
  /// in its name. Takes no lock. Nothing else may be called afterwards.
  virtual void abandon() = 0;
  /// Wakes the waits of this rank so that they check `WaitOptions::cancelled`.
  virtual void wake() = 0;
};

}  // namespace multiring
