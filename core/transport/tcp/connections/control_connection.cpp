#include "transport/tcp/connections/control_connection.h"

#include <algorithm>

namespace multiring::tcp {

void ControlConnection::send_frame(std::span<const std::byte> frame) {
  output_.insert(output_.end(), frame.begin(), frame.end());
  write();
}

void ControlConnection::advance() {
  if (open() && readable_) read();
  if (open() && writable_) write();
}

void ControlConnection::write() {
  while (open() && !output_.empty()) {
    const iovec piece{output_.data(), output_.size()};
    const std::size_t put = send(&piece, 1);
    if (put == 0) return;
    output_.erase(output_.begin(), output_.begin() + static_cast<std::ptrdiff_t>(put));
  }
}

void ControlConnection::read() {
  while (open() && readable_) {
    const std::size_t got = receive(input_.data() + input_bytes_, input_.size() - input_bytes_);
    input_bytes_ += got;
    while (handle_frame()) {
    }
    if (got == 0) return;
  }
}

// False: the frame is not complete yet.
bool ControlConnection::handle_frame() {
  if (input_bytes_ < kFrameHeaderBytes) return false;
  const std::span<const std::byte> input = std::span(input_).first(input_bytes_);
  const auto header = parse_frame_header(input.first(kFrameHeaderBytes));
  if (!header || header->kind == FrameKind::kData) {
    input_bytes_ = 0;
    readable_ = false;
    observer_.on_fault(*this, ErrorKind::kInternal,
                       "sent something other than a control frame on its control connection");
    return false;
  }
  const std::size_t frame_bytes = kFrameHeaderBytes + header->bytes;
  if (input.size() < frame_bytes) return false;
  if (header->kind == FrameKind::kGoodbye) {
    control_.on_goodbye(*this);
  } else if (const auto record = parse_abort(input.subspan(kFrameHeaderBytes, header->bytes), size_)) {
    control_.on_abort(*this, *record);
  } else {
    observer_.on_fault(*this, ErrorKind::kInternal, "sent an abort that cannot be read");
  }
  std::copy(input_.begin() + static_cast<std::ptrdiff_t>(frame_bytes),
            input_.begin() + static_cast<std::ptrdiff_t>(input_bytes_), input_.begin());
  input_bytes_ -= frame_bytes;
  return true;
}

}  // namespace multiring::tcp
