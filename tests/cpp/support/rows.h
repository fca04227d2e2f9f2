#pragma once

#include <cstddef>
#include <cstdint>

#include "support/operations.h"
#include "topology/chunks.h"

namespace multiring::testing {

/// How many rows each rank has: the same number, or unequal ones, none for some.
struct Rows {
  std::uint64_t base;
  std::uint64_t step;
  std::uint64_t of(std::size_t rank) const { return base + step * ((rank * 3 + 1) % 4); }
};

/// What a rank has.
Bytes input_of(DType dtype, std::uint64_t elements, std::size_t rank);
Bytes slice(const Bytes& bytes, std::size_t begin, std::size_t end);
void append(Bytes& to, const Bytes& more);

/// What reduce_scatter gives as `block` of `count` elements that the ranks have.
Bytes reduced_block(DType dtype, ReduceOp op, std::uint64_t count, const Range& block, std::size_t size);

}  // namespace multiring::testing
