// The bytes of a connection after its handshake: frames one after the other, as a connection reads them.

#include <cstddef>
#include <cstdint>
#include <span>

#include "require.h"
#include "transport/tcp/connections/frame.h"

namespace {

using namespace multiring;

constexpr int kRanks = 4;

void check_abort(std::span<const std::byte> payload) {
  const auto record = tcp::parse_abort(payload, kRanks);
  if (!record) return;
  MULTIRING_REQUIRE(record->origin >= 0 && record->origin < kRanks);
  MULTIRING_REQUIRE(record->message.size() <= tcp::kAbortTextBytes);
  const auto again = tcp::encode_abort(*record);
  const auto header = tcp::parse_frame_header(std::span(again).first(tcp::kFrameHeaderBytes));
  MULTIRING_REQUIRE(header && header->bytes == again.size() - tcp::kFrameHeaderBytes);
  MULTIRING_REQUIRE(tcp::parse_abort(std::span(again).subspan(tcp::kFrameHeaderBytes), kRanks).has_value());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::span<const std::byte> input = std::as_bytes(std::span(data, size));
  check_abort(input);
  while (input.size() >= tcp::kFrameHeaderBytes) {
    const auto bytes = input.first(tcp::kFrameHeaderBytes);
    const auto header = tcp::parse_frame_header(bytes);
    if (!header) break;
    // Whatever is let through can be received into `message_bytes` of memory.
    MULTIRING_REQUIRE(header->offset <= header->message_bytes);
    MULTIRING_REQUIRE(header->kind != tcp::FrameKind::kData ||
                      header->bytes <= header->message_bytes - header->offset);
    MULTIRING_REQUIRE(header->kind == tcp::FrameKind::kData || header->bytes <= tcp::kMaxAbortBytes);
    const tcp::FrameHeaderBytes again = tcp::encode_frame_header(*header);
    MULTIRING_REQUIRE(tcp::parse_frame_header(again) == header);
    input = input.subspan(tcp::kFrameHeaderBytes);
    if (header->bytes > input.size()) break;
    const auto payload = input.first(header->bytes);
    if (header->kind == tcp::FrameKind::kAbort) check_abort(payload);
    input = input.subspan(header->bytes);
  }
  return 0;
}
