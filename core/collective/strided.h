#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/arithmetic/dtype.h"
#include "base/export.h"
#include "collective/descriptor.h"

namespace multiring {

struct Operation;

/// An array in host memory whose elements lie anywhere, in C order of its indices.
struct MULTIRING_API StridedView {
  std::byte* data = nullptr;  ///< the element whose indices are all 0
  DType dtype = DType::kUInt8;
  int dims = 0;
  std::array<std::int64_t, Descriptor::kMaxDims> shape{};
  std::array<std::int64_t, Descriptor::kMaxDims> strides{};  ///< in bytes
  bool is_negated = false;     ///< the memory holds the negatives of the elements
  bool is_conjugated = false;  ///< the memory holds the conjugates of the elements, or of their negatives

  std::size_t count() const;
  std::size_t bytes() const { return count() * dtype_size(dtype); }
  /// The first byte of the memory that the elements lie in, and how many bytes that memory spans.
  const std::byte* lowest() const;
  std::size_t extent() const;

  /// Whether elements may share memory, as those of a broadcast array do. Arrays whose dimensions are
  /// interleaved in other ways than by slices and transposition may be taken for such.
  bool may_overlap_itself() const;

  void copy_to(std::byte* contiguous) const;
  void copy_from(const std::byte* contiguous) const;
};

/// Arrays of an operation that are not one contiguous array each. The operation reads them when it begins,
/// and writes them before it ends, so that its place among other operations is that of its memory.
struct StridedArrays {
  std::vector<StridedView> inputs;   ///< joined they are the input; none: the operation's own is contiguous
  std::vector<StridedView> outputs;  ///< the same for the output
  std::unique_ptr<std::byte[]> input, output;  ///< contiguous copies, while the operation runs
};

/// Copies the inputs of `operation` to contiguous memory, and has it write to such memory.
void read_strided(Operation& operation);
/// Copies what the operation has written to where its outputs lie.
void write_strided(Operation& operation);

}  // namespace multiring
