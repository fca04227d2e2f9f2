#include "collective/staged/copy.h"

#include <cstring>

#include "topology/chunks.h"

namespace multiring {

StagedCopy::StagedCopy(Exchange& exchange, const OperationCall& call, std::span<const Outgoing> outgoing)
    : exchange_(exchange),
      call_(call),
      outgoing_(outgoing),
      lane_bytes_(exchange.transport().staging_bytes() / outgoing.size() / 64 * 64) {
  if (lane_bytes_ == 0)
    throw Error(ErrorKind::kUsage, "MULTIRING_STAGING_BYTES is too small for " +
                                       std::to_string(outgoing.size()) +
                                       " ranks: at least 64 bytes a rank are needed");
}

void StagedCopy::run(std::span<const Incoming> incoming, std::size_t longest) {
  const std::size_t segments = segment_count(longest, lane_bytes_);
  for (std::size_t segment = 0; segment < segments; ++segment) {
    drain(segment, incoming);
    if (segment + 1 == segments) break;
    exchange_.begin(call_.descriptor);
    fill(segment + 1);
    exchange_.synchronise_again(call_);
  }
}

void StagedCopy::fill(std::size_t segment) {
  if (exchange_.size() == 1) return;  // no other rank reads
  std::byte* staging = exchange_.staging(exchange_.rank());
  for (std::size_t lane = 0; lane < outgoing_.size(); ++lane) {
    const Range range = segment_range(outgoing_[lane].bytes, lane_bytes_, segment);
    if (!range.empty())
      std::memcpy(staging + lane * lane_bytes_, outgoing_[lane].data + range.begin, range.size());
    if (!range.empty()) exchange_.staged(lane * lane_bytes_ + range.size());
  }
}

void StagedCopy::drain(std::size_t segment, std::span<const Incoming> incoming) {
  const std::size_t lane = outgoing_.size() == 1 ? 0 : static_cast<std::size_t>(exchange_.rank());
  // Start with the next rank: the readers of a lane do not all queue for the same memory.
  for (int step = 1; step <= exchange_.size(); ++step) {
    const int source = (exchange_.rank() + step) % exchange_.size();
    const Incoming& piece = incoming[static_cast<std::size_t>(source)];
    const Range range = segment_range(piece.bytes, lane_bytes_, segment);
    if (piece.data == nullptr || range.empty()) continue;
    const std::byte* from = source == exchange_.rank() ? outgoing_[lane].data + range.begin
                                                       : exchange_.staging(source) + lane * lane_bytes_;
    std::memcpy(piece.data + range.begin, from, range.size());
  }
}

}  // namespace multiring
