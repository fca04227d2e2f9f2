#include "support/rows.h"

#include <vector>

namespace multiring::testing {

Bytes input_of(DType dtype, std::uint64_t elements, std::size_t rank) {
  return periodic_elements(dtype, elements, static_cast<std::uint32_t>(rank * 7 + elements), false);
}

Bytes slice(const Bytes& bytes, std::size_t begin, std::size_t end) {
  return {bytes.begin() + static_cast<std::ptrdiff_t>(begin),
          bytes.begin() + static_cast<std::ptrdiff_t>(end)};
}

void append(Bytes& to, const Bytes& more) { to.insert(to.end(), more.begin(), more.end()); }

Bytes reduced_block(DType dtype, ReduceOp op, std::uint64_t count, const Range& block, std::size_t size) {
  std::vector<Bytes> parts;
  for (std::size_t rank = 0; rank < size; ++rank)
    parts.push_back(
        slice(input_of(dtype, count, rank), block.begin * dtype_size(dtype), block.end * dtype_size(dtype)));
  return reduce_oracle(dtype, {op}, parts);
}

}  // namespace multiring::testing
