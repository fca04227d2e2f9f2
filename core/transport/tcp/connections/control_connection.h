#pragma once

#include <array>
#include <span>
#include <vector>

#include "transport/tcp/connections/connection.h"
#include "transport/tcp/connections/frame.h"

namespace multiring::tcp {

/// What control connections tell of.
class ControlObserver : public LinkObserver {
 public:
  virtual void heard_abort(TcpLink& link, const AbortRecord& record) = 0;
  virtual void heard_goodbye(TcpLink& link) = 0;

 protected:
  ~ControlObserver() = default;
};

/// The connection for what has to get through whatever the data connections are doing. It carries an abort
/// and a goodbye at most, and tells by its end that the peer died; where no end comes, because the peer's
/// host or the network is gone, by its heartbeat.
class ControlLink final : public TcpLink {
 public:
  ControlLink(Descriptor socket, int peer, int size, ControlObserver& observer)
      : TcpLink(std::move(socket), peer, observer), control_(observer), size_(size) {}

  /// Sends a frame as soon as there is room, usually at once.
  void say(std::span<const std::byte> frame);
  void turn() override;
  bool can_move() const override { return open() && (readable_ || (writable_ && !output_.empty())); }

 private:
  void read();
  void write();
  bool heard();

  ControlObserver& control_;
  int size_;
  std::array<std::byte, kFrameHeaderBytes + kMaxAbortBytes> input_;
  std::size_t input_bytes_ = 0;
  std::vector<std::byte> output_;
};

}  // namespace multiring::tcp
