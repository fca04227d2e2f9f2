#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/error.h"
#include "base/immovable.h"
#include "transport/tcp/poller.h"

namespace multiring::tcp {

class TcpConnection;

class ConnectionObserver {
 public:
  /// It can advance.
  virtual void on_ready(TcpConnection& connection) = 0;
  /// `error`: an error number; 0: closed by the peer.
  virtual void on_closed(TcpConnection& connection, int error) = 0;
  /// The peer violated the protocol, or sent what does not match what was posted.
  virtual void on_fault(TcpConnection& connection, ErrorKind kind, const std::string& what) = 0;

 protected:
  ~ConnectionObserver() = default;
};

/// A connection between two ranks of the job, after its handshake.
class TcpConnection : public EventSink, Immovable {
 public:
  TcpConnection(Descriptor socket, int peer, ConnectionObserver& observer)
      : observer_(observer), socket_(std::move(socket)), peer_(peer) {}
  virtual ~TcpConnection() = default;

  int peer() const { return peer_; }
  bool open() const { return static_cast<bool>(socket_); }
  const Descriptor& socket() const { return socket_; }
  void on_events(std::uint32_t events) final;

  /// Sends and receives what it can, up to a limit, so that all connections of a rank advance.
  virtual void advance() = 0;
  /// Whether there may be something to send or receive now.
  virtual bool can_advance() const = 0;
  /// For the observer: it is in a queue of connections that can advance.
  bool queued = false;

  /// Tells the peer that nothing more will be sent.
  void end_output();
  /// For how long the peer's kernel has not acknowledged anything. Precise only if called regularly.
  struct Silence {
    double unanswered = 0.0;    ///< seconds since something was sent that was not acknowledged; 0: none
    double since_answer = 0.0;  ///< seconds since the last acknowledgement
    double since_heard = 0.0;   ///< seconds since anything came
  };
  Silence silence(Clock::time_point now);
  /// Closes the connection: its peer does not answer.
  void expire();
  /// Equal for connections between the same two addresses.
  std::string path;
  /// After `end_output`: discards input. True when nothing that was sent can be lost any more.
  bool delivered();

 protected:
  /// Receives up to `bytes` (not 0) into `to`. 0: none for now, or the connection is closed.
  std::size_t receive(std::byte* to, std::size_t bytes);
  std::size_t send(const iovec* pieces, std::size_t count);
  /// Bytes.
  std::size_t unacknowledged() const;

  ConnectionObserver& observer_;
  // As the kernel reported last. It reports again after a call has found nothing left.
  bool readable_ = false;
  bool writable_ = false;

 private:
  void fail(int error);

  Descriptor socket_;
  int peer_;
  bool ending_ = false;  // the peer will send nothing more
  std::optional<Clock::time_point> unanswered_since_;
};

}  // namespace multiring::tcp
