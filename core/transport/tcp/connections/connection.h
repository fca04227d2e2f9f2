#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/error.h"
#include "transport/tcp/poller.h"

namespace multiring::tcp {

class TcpLink;

/// What a connection tells of.
class LinkObserver {
 public:
  /// It can move something: give it a turn.
  virtual void has_work(TcpLink& link) = 0;
  /// It is closed: by the peer (0), or with an error number.
  virtual void closed(TcpLink& link, int error) = 0;
  /// The peer sent what is against the rules, or against what was posted.
  virtual void fault(TcpLink& link, ErrorKind kind, const std::string& what) = 0;

 protected:
  ~LinkObserver() = default;
};

/// A connection between two ranks of the job, after its handshake.
class TcpLink : public EventSink {
 public:
  TcpLink(Descriptor socket, int peer, LinkObserver& observer)
      : observer_(observer), socket_(std::move(socket)), peer_(peer) {}
  virtual ~TcpLink() = default;
  TcpLink(const TcpLink&) = delete;
  TcpLink& operator=(const TcpLink&) = delete;

  int peer() const { return peer_; }
  bool open() const { return static_cast<bool>(socket_); }
  const Descriptor& socket() const { return socket_; }
  void on_events(std::uint32_t events) final;

  /// Moves some of what can be moved; a bounded amount, so that all connections of a rank advance together.
  virtual void turn() = 0;
  /// Whether a turn may move something.
  virtual bool can_move() const = 0;
  /// Of use to its observer: it stands in a queue of connections that can move something.
  bool queued = false;

  /// Tells the peer that nothing more will be sent.
  void end_output();
  /// For how long the peer's kernel has owed an answer, of any kind; to be asked again and again to know.
  struct Silence {
    double owed = 0.0;          ///< seconds since something was sent that has had no answer; 0: nothing
    double since_answer = 0.0;  ///< seconds since the last answer to anything
    double since_heard = 0.0;   ///< seconds since anything came
  };
  Silence silence(Clock::time_point now);
  /// Closes the connection, whose peer does not answer.
  void expire();
  /// Equal for connections that go the same way.
  std::string path;
  /// After `end_output`, before the connection is let go: discards what comes in. True when nothing that was
  /// sent can be lost any more.
  bool delivered();

 protected:
  /// Receives at most `bytes` into `to`, more than 0; how many it were, or 0 if there are none for now.
  std::size_t receive(std::byte* to, std::size_t bytes);
  std::size_t send(const iovec* pieces, std::size_t count);
  /// Bytes that were sent and the peer's kernel has not acknowledged.
  std::size_t undelivered() const;

  LinkObserver& observer_;
  // What the kernel said last; it speaks up again when it has said that there is nothing left.
  bool readable_ = false;
  bool writable_ = false;

 private:
  void fail(int error);

  Descriptor socket_;
  int peer_;
  bool ending_ = false;  // the peer sends no more than what is there
  std::optional<Clock::time_point> unanswered_since_;
};

}  // namespace multiring::tcp
