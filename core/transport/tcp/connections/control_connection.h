#pragma once

#include <array>
#include <span>
#include <vector>

#include "transport/tcp/connections/connection.h"
#include "transport/tcp/connections/frame.h"

namespace multiring::tcp {

class ControlObserver : public ConnectionObserver {
 public:
  virtual void on_abort(TcpConnection& connection, const AbortRecord& record) = 0;
  virtual void on_goodbye(TcpConnection& connection) = 0;

 protected:
  ~ControlObserver() = default;
};

/// The connection for what must not wait behind data. It carries at most an abort and a goodbye. Its end
/// tells that the peer died, and its heartbeat that the peer's host or the network has vanished.
class ControlConnection final : public TcpConnection {
 public:
  ControlConnection(Descriptor socket, int peer, int size, ControlObserver& observer)
      : TcpConnection(std::move(socket), peer, observer), control_(observer), size_(size) {}

  /// Sends at once, or else as soon as there is room.
  void send_frame(std::span<const std::byte> frame);
  void advance() override;
  bool can_advance() const override { return open() && (readable_ || (writable_ && !output_.empty())); }

 private:
  void read();
  void write();
  bool handle_frame();

  ControlObserver& control_;
  int size_;
  std::array<std::byte, kFrameHeaderBytes + kMaxAbortBytes> input_;
  std::size_t input_bytes_ = 0;
  std::vector<std::byte> output_;
};

}  // namespace multiring::tcp
