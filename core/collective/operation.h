#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "collective/descriptor.h"
#include "transport/transport.h"

namespace multiring {

/// Memory for a result whose size is known only after the ranks have compared descriptors.
class ResultBuffer {
 public:
  void allocate(std::size_t bytes) {
    bytes_ = bytes;
    data_.reset(
        static_cast<std::byte*>(std::aligned_alloc(64, (std::max<std::size_t>(bytes, 1) + 63) / 64 * 64)));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  std::byte* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t bytes_ = 0;
};

/// Whole elements of an array that is not contiguous.
struct Piece {
  const std::byte* input;
  std::byte* output;  ///< may be the input; null: no result wanted
  std::size_t bytes;
};

/// One collective call of one rank: what to do, on which memory, and what came out.
///
/// `descriptor.rows` and `descriptor.key.count` give the extents: allreduce and broadcast see one flat array;
/// reduce_scatter, allgather, alltoall, gather and scatter split or join along rows (axis 0).
struct Operation {
  Descriptor descriptor;
  const std::byte* input = nullptr;
  /// Null: the collective allocates `result` (not for allreduce and broadcast).
  std::byte* output = nullptr;
  std::size_t output_bytes = 0;         ///< room at `output`
  std::vector<Piece> pieces;            ///< allreduce: the array, where `input` and `output` are null
  std::vector<std::uint64_t> splits;    ///< alltoall: rows for each rank
  std::vector<std::uint64_t> received;  ///< allgather, alltoall, gather: rows that came from each rank
  ResultBuffer result;
  // Kept so that the memory stays mapped while peers use it.
  std::shared_ptr<SymmetricRegion> input_region;
  std::shared_ptr<SymmetricRegion> output_region;
  bool is_widened = false;  ///< sums are int64 for another dtype (sums/integer_average.h)

  /// Dtype of what is added or moved.
  DType dtype() const { return is_widened ? DType::kInt64 : descriptor.dtype; }
  std::size_t element_size() const { return dtype_size(dtype()); }
  Reduction reduction() const {
    if (is_widened) return {};
    return {descriptor.key.op, descriptor.key.prescale, descriptor.key.postscale};
  }
};

}  // namespace multiring
