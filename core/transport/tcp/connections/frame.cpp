#include "transport/tcp/connections/frame.h"

#include <string_view>

#include "base/text.h"
#include "transport/tcp/byte_order.h"

namespace multiring::tcp {
namespace {

constexpr std::uint32_t kMagic = 0x4652524d;  // "MRRF"

bool agrees(const FrameHeader& header) {
  switch (header.kind) {
    case FrameKind::kData:
      return header.sequence > 0 && header.offset <= header.message_bytes &&
             header.bytes <= header.message_bytes - header.offset &&
             (header.bytes > 0 || header.message_bytes == 0);
    case FrameKind::kAbort:
      return header.channel == 0 && header.sequence == 0 && header.message_bytes == 0 && header.offset == 0 &&
             header.bytes >= kAbortNumberBytes && header.bytes <= kMaxAbortBytes;
    case FrameKind::kGoodbye:
      return header == FrameHeader{.kind = FrameKind::kGoodbye};
  }
  return false;
}

}  // namespace

FrameHeaderBytes encode_frame_header(const FrameHeader& header) {
  FrameHeaderBytes bytes;
  FieldWriter writer(bytes);
  writer.put(kMagic);
  writer.put(static_cast<std::uint32_t>(header.kind));
  writer.put(header.channel);
  writer.put(std::uint32_t{0});
  writer.put(header.sequence);
  writer.put(header.message_bytes);
  writer.put(header.offset);
  writer.put(header.bytes);
  return bytes;
}

std::optional<FrameHeader> parse_frame_header(std::span<const std::byte> bytes) {
  if (bytes.size() != kFrameHeaderBytes) return std::nullopt;
  FieldReader reader(bytes);
  if (reader.get<std::uint32_t>() != kMagic) return std::nullopt;
  const auto kind = reader.get<std::uint32_t>();
  if (kind < 1 || kind > 3) return std::nullopt;
  FrameHeader header;
  header.kind = static_cast<FrameKind>(kind);
  header.channel = reader.get<std::uint32_t>();
  if (reader.get<std::uint32_t>() != 0) return std::nullopt;
  header.sequence = reader.get<std::uint64_t>();
  header.message_bytes = reader.get<std::uint64_t>();
  header.offset = reader.get<std::uint64_t>();
  header.bytes = reader.get<std::uint64_t>();
  if (!agrees(header)) return std::nullopt;
  return header;
}

std::vector<std::byte> encode_abort(const AbortRecord& record) {
  const auto cut = [](const std::string& text, std::size_t limit) {
    return bytes_of(text).first(cut_length(text, limit));
  };
  const auto operation = cut(record.about.operation, AbortRecord::kOperationBytes);
  const auto tensor = cut(record.about.tensor, AbortRecord::kTensorBytes);
  const auto text = cut(record.message, kAbortTextBytes);
  FrameHeader header;
  header.kind = FrameKind::kAbort;
  header.bytes = kAbortNumberBytes + operation.size() + tensor.size() + text.size();
  std::vector<std::byte> frame(kFrameHeaderBytes + header.bytes);
  FieldWriter writer(frame);
  writer.put(std::span<const std::byte>(encode_frame_header(header)));
  writer.put(static_cast<std::uint8_t>(record.kind));
  writer.put(static_cast<std::int32_t>(record.origin));
  writer.put(static_cast<std::int32_t>(record.about.common));
  writer.put(static_cast<std::int32_t>(record.about.odd));
  writer.put(static_cast<std::uint8_t>(operation.size()));
  writer.put(static_cast<std::uint8_t>(tensor.size()));
  for (const auto part : {operation, tensor, text}) writer.put(part);
  return frame;
}

std::vector<std::byte> encode_goodbye() {
  const FrameHeaderBytes header = encode_frame_header({.kind = FrameKind::kGoodbye});
  return {header.begin(), header.end()};
}

std::optional<AbortRecord> parse_abort(std::span<const std::byte> payload, int size) {
  if (payload.size() < kAbortNumberBytes || payload.size() > kMaxAbortBytes) return std::nullopt;
  FieldReader reader(payload);
  const auto kind = reader.get<std::uint8_t>();
  if (kind < static_cast<std::uint8_t>(ErrorKind::kUsage) ||
      kind > static_cast<std::uint8_t>(ErrorKind::kInternal))
    return std::nullopt;
  AbortRecord record;
  record.kind = static_cast<ErrorKind>(kind);
  record.origin = reader.get<std::int32_t>();
  if (record.origin < 0 || record.origin >= size) return std::nullopt;
  record.about.common = reader.get<std::int32_t>();
  record.about.odd = reader.get<std::int32_t>();
  for (const int rank : {record.about.common, record.about.odd})
    if (rank < -1 || rank >= size) return std::nullopt;
  const std::size_t operation = reader.get<std::uint8_t>();
  const std::size_t tensor = reader.get<std::uint8_t>();
  std::string_view texts(reinterpret_cast<const char*>(payload.data()), payload.size());
  texts.remove_prefix(kAbortNumberBytes);
  if (operation > AbortRecord::kOperationBytes || operation + tensor > texts.size()) return std::nullopt;
  if (texts.size() - operation - tensor > kAbortTextBytes) return std::nullopt;
  record.about.operation = texts.substr(0, operation);
  record.about.tensor = texts.substr(operation, tensor);
  record.message = texts.substr(operation + tensor);
  return record;
}

}  // namespace multiring::tcp
