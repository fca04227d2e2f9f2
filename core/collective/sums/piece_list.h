#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "base/immovable.h"
#include "collective/operation.h"
#include "topology/chunks.h"

namespace multiring {

/// The elements of a collective as one sequence of bytes: the pieces of one array, or several arrays.
class PieceList : Immovable {
 public:
  explicit PieceList(std::span<Operation* const> operations);

  std::size_t bytes() const { return bytes_; }

  /// Calls body(piece, offset, range_offset, bytes) for each piece's share of `range`: `offset` in the piece,
  /// `range_offset` in the range. `cursor`, an index up to that of the first piece, moves along.
  template <class Body>
  void for_each_share(std::size_t& cursor, Range range, const Body& body) const {
    if (range.empty()) return;
    if (many_.empty()) return body(one_, range.begin, 0, range.size());
    while (ends_[cursor] <= range.begin) ++cursor;
    for (std::size_t begin = range.begin;; ++cursor) {
      const std::size_t end = std::min(ends_[cursor], range.end);
      const std::size_t piece_begin = ends_[cursor] - many_[cursor].bytes;
      body(many_[cursor], begin - piece_begin, begin - range.begin, end - begin);
      if (end == range.end) return;
      begin = end;
    }
  }

  /// The part of a piece that `range` is, or else nothing: it is parts of several.
  std::optional<Piece> piece_of(std::size_t& cursor, Range range) const;

  /// Copies what is to be added, or what came out, between the pieces and memory of `range.size()` bytes.
  void read(std::size_t& cursor, Range range, std::byte* to) const;
  void write(std::size_t& cursor, Range range, const std::byte* from) const;

 private:
  void add(const Piece& piece);

  // One piece needs no memory of the heap; the ends of more are in `ends_`.
  Piece one_{};
  std::vector<Piece> many_;
  std::vector<std::size_t> ends_;
  std::size_t bytes_ = 0;
};

}  // namespace multiring
