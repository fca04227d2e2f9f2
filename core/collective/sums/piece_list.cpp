#include "collective/sums/piece_list.h"

#include "base/arithmetic/kernels/copy.h"

namespace multiring {

PieceList::PieceList(std::span<Operation* const> operations) {
  const Operation& first = *operations[0];
  if (operations.size() == 1 && first.pieces.empty()) {
    one_ = {first.input, first.output, first.descriptor.bytes};
    bytes_ = one_.bytes;
    return;
  }
  for (const Operation* operation : operations) {
    if (operation->pieces.empty()) add({operation->input, operation->output, operation->descriptor.bytes});
    for (const Piece& piece : operation->pieces) add(piece);
  }
}

void PieceList::add(const Piece& piece) {
  if (piece.bytes == 0) return;
  bytes_ += piece.bytes;
  many_.push_back(piece);
  ends_.push_back(bytes_);
}

std::optional<Piece> PieceList::piece_of(std::size_t& cursor, Range range) const {
  std::optional<Piece> found;
  for_each_share(cursor, range, [&](const Piece& piece, std::size_t offset, std::size_t, std::size_t bytes) {
    if (bytes < range.size()) return;
    const bool wanted = piece.output != nullptr;
    found = {piece.input + offset, wanted ? piece.output + offset : nullptr, bytes};
  });
  return found;
}

void PieceList::read(std::size_t& cursor, Range range, std::byte* to) const {
  for_each_share(cursor, range,
                 [&](const Piece& piece, std::size_t offset, std::size_t range_offset, std::size_t bytes) {
                   copy_bytes(to + range_offset, piece.input + offset, bytes);
                 });
}

void PieceList::write(std::size_t& cursor, Range range, const std::byte* from) const {
  for_each_share(cursor, range,
                 [&](const Piece& piece, std::size_t offset, std::size_t range_offset, std::size_t bytes) {
                   if (piece.output != nullptr) copy_bytes(piece.output + offset, from + range_offset, bytes);
                 });
}

}  // namespace multiring
