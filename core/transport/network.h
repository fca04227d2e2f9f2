#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/export.h"
#include "transport/transport.h"

namespace multiring {

/// Messages between ranks that share no memory.
///
/// A *stream* is an ordered pair of ranks and a *channel*: its messages arrive in the order in which they
/// were sent, and independently of all other streams. The n-th receive that is posted on a stream takes the
/// n-th message that is sent on it, and both have to be of the same length: otherwise the network is aborted
/// with a mismatch that names both ranks and lengths.
///
/// Posting never blocks. What was posted moves while its rank waits or calls `progress`: there is no thread
/// behind it. So a message may be sent before its receive is posted, and any number may be posted in both
/// directions at once; what its receiver has not posted yet stays with the sender and in the kernel's
/// buffers.
///
/// One thread of a rank at a time connects, waits and makes progress. Any thread may post, and call `done`,
/// `give_up`, `abort`, `aborted`, `leave`, `host`, `wake` and `abandon` at any time. A wait that sleeps may
/// take a twentieth of a second to see what another thread has posted, unless that one calls `wake`.
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
  /// Name of the host of `rank`, or else its address, for messages. Asks the store if need be, but does not
  /// wait; empty: not known.
  virtual std::string host(int rank) = 0;

  /// Makes messages possible on `links`; those that stand already cost nothing. The peer has to do the same,
  /// sooner or later: name all links of a plan in one call, so that ranks do not wait for each other in a
  /// circle. Raises what is in the way and names both ends: kPeerLost, kTimeout, kUsage (they cannot reach
  /// each other, or do not belong to the same job), kAborted.
  virtual void connect(std::span<const Link> links, const Waiting& waiting) = 0;

  /// Whether links can be made when they are first needed, by `reach` of one end alone.
  virtual bool links_on_demand() const { return false; }
  /// As connect, but the peers need only make progress now and then, and what is begun goes on when the wait
  /// has ended with kTimeout: call it again. kPeerLost is an outcome, too.
  virtual WaitResult reach(std::span<const Link> links, const Waiting& waiting) {
    connect(links, waiting);
    return {};
  }
  /// Whether messages are possible on `link`.
  virtual bool linked(const Link&) const { return true; }
  /// Changes whenever peers may have made links possible. Any thread may ask.
  virtual std::uint64_t arrivals() const { return 0; }

  /// kPeerLost if `rank` is known to have left or died.
  virtual WaitResult ended(int /*rank*/) const { return {}; }

  /// Sends what `parts` make one after the other. The memory is not to be changed before the message is done;
  /// the list of parts itself is copied.
  virtual Ticket post_send(int peer, int channel, std::span<const std::span<const std::byte>> parts) = 0;
  /// Receives into `buffer`, which is of no defined content before the message is done.
  virtual Ticket post_receive(int peer, int channel, std::span<std::byte> buffer) = 0;

  /// Waits until all messages of `tickets` are done, which uses the tickets up. A send is done when its
  /// memory may be changed, not when the peer has the message. After any other outcome all tickets are as
  /// before: they can be waited for again, or given up.
  virtual WaitResult wait(std::span<const Ticket> tickets, const Waiting& waiting) = 0;
  /// Whether the message is done, from what is known already. Does not use the ticket up.
  virtual bool done(Ticket ticket) const = 0;
  /// Gives the memory of messages back that are not needed any more, done or not, and uses their tickets up.
  /// Where one was not done, both streams of its link are out of step: nothing moves there any more, waits
  /// for what is pending raise kInternal, and nothing may be posted.
  virtual void give_up(std::span<const Ticket> tickets) = 0;
  /// Moves what can be moved without waiting.
  virtual void progress() = 0;
  /// Memory that messages lie in, for networks that may touch it even after what was given up: they keep it
  /// as long as they may.
  virtual void keep(std::shared_ptr<const void>) {}

  /// Tells of an error: the waits of this rank and of all that it is connected with, directly or through
  /// others, end with kAborted. The first error wins. Those that are still connecting with it learn of it
  /// when it makes progress, or from its end.
  virtual void abort(ErrorKind kind, const std::string& message) = 0;
  /// The same for an error that a rank has told of elsewhere.
  virtual void relay(const AbortRecord& record) = 0;
  /// The first error that any rank told of; false if there is none.
  virtual bool aborted(AbortRecord* record) const = 0;
  /// Says goodbye: peers learn that this rank left rather than died. Messages that were done still arrive.
  /// Nothing can be posted or connected afterwards. Idempotent.
  virtual void leave() = 0;
  /// This process is a fork of the rank's: lets go of what would keep peers from noticing the rank's end, and
  /// never says goodbye in its name. Takes no lock. Nothing else may be called afterwards.
  virtual void abandon() = 0;
  /// Wakes the waits of this rank so that they look at `Waiting::cancelled`.
  virtual void wake() = 0;
};

}  // namespace multiring
