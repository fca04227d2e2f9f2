#include "collective/staged/staged_copy.h"

#include "base/arithmetic/kernels/copy.h"

namespace multiring {

StagedCopy::StagedCopy(RoundExchange& exchange, const OperationCall& call, std::span<const Outgoing> outgoing,
                       std::size_t longest)
    : exchange_(exchange),
      call_(call),
      outgoing_(outgoing),
      sections_(exchange.transport().staging_bytes(), outgoing.size(), longest) {
  if (sections_.most() == 0)
    throw Error(ErrorKind::kUsage, "MULTIRING_STAGING_BYTES is too small for " +
                                       std::to_string(outgoing.size()) +
                                       " ranks: at least 64 bytes a rank are needed");
}

void StagedCopy::set_longest(std::size_t longest) {
  sections_ = {exchange_.transport().staging_bytes(), outgoing_.size(), longest};
}

void StagedCopy::run(std::span<const Incoming> incoming) {
  for_each_segment([&](std::size_t segment) {
    // Start with the next rank: the readers of a section do not all queue for the same memory.
    for (int step = 1; step <= exchange_.size(); ++step) {
      const int source = (exchange_.rank() + step) % exchange_.size();
      const Incoming& piece = incoming[static_cast<std::size_t>(source)];
      const Range range = range_of(piece.bytes, segment);
      if (piece.data != nullptr && !range.empty())
        copy_bytes(piece.data + range.begin, staged_by(source, segment), range.size());
    }
  });
}

void StagedCopy::stage(std::size_t segment) {
  if (exchange_.size() == 1) return;  // no other rank reads
  std::byte* staging = exchange_.staging(exchange_.rank());
  for (std::size_t section = 0; section < outgoing_.size(); ++section) {
    const Range range = range_of(outgoing_[section].bytes, segment);
    if (range.empty()) continue;
    const std::size_t begin = sections_.begin(section, segment);
    copy_bytes(staging + begin, outgoing_[section].data + range.begin, range.size());
    exchange_.staged(begin + range.size());
  }
}

const std::byte* StagedCopy::staged_by(int source, std::size_t segment) const {
  const std::size_t section = outgoing_.size() == 1 ? 0 : static_cast<std::size_t>(exchange_.rank());
  return source == exchange_.rank() ? outgoing_[section].data + segment * sections_.most()
                                    : exchange_.staging(source) + sections_.begin(section, segment);
}

}  // namespace multiring
