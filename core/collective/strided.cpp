#include "collective/strided.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/arithmetic/kernels/copy.h"
#include "collective/kinds.h"
#include "collective/operation.h"

namespace multiring {
namespace {

/// The dimensions of a view that are left when those are joined that lie one after the other.
struct Layout {
  int dims = 0;
  std::array<std::int64_t, Descriptor::kMaxDims> shape{};
  std::array<std::int64_t, Descriptor::kMaxDims> strides{};
};

Layout joined(const StridedView& view) {
  Layout layout;
  for (int dim = 0; dim < view.dims; ++dim) {
    const auto at = static_cast<std::size_t>(dim);
    if (view.shape[at] == 1) continue;
    if (layout.dims > 0) {
      const auto last = static_cast<std::size_t>(layout.dims - 1);
      if (layout.strides[last] == view.shape[at] * view.strides[at]) {
        layout.shape[last] *= view.shape[at];
        layout.strides[last] = view.strides[at];
        continue;
      }
    }
    layout.shape[static_cast<std::size_t>(layout.dims)] = view.shape[at];
    layout.strides[static_cast<std::size_t>(layout.dims)] = view.strides[at];
    ++layout.dims;
  }
  return layout;
}

/// Calls `copy(strided, contiguous, elements, stride)` for each row along the last dimension.
template <class Copy>
void for_each_row(const StridedView& view, std::byte* contiguous, const Copy& copy) {
  if (view.count() == 0) return;
  const Layout layout = joined(view);
  const int outer = std::max(layout.dims - 1, 0);
  const auto row = static_cast<std::size_t>(outer);
  const auto element = static_cast<std::int64_t>(dtype_size(view.dtype));
  const std::int64_t elements = layout.dims == 0 ? 1 : layout.shape[row];
  const std::int64_t stride = layout.dims == 0 ? element : layout.strides[row];
  std::array<std::int64_t, Descriptor::kMaxDims> index{};
  std::byte* from = view.data;
  for (;;) {
    copy(from, contiguous, static_cast<std::size_t>(elements), stride);
    contiguous += elements * element;
    int dim = outer - 1;
    for (; dim >= 0; --dim) {
      const auto at = static_cast<std::size_t>(dim);
      from += layout.strides[at];
      if (++index[at] < layout.shape[at]) break;
      from -= layout.strides[at] * layout.shape[at];
      index[at] = 0;
    }
    if (dim < 0) return;
  }
}

template <class Element, bool kToContiguous>
void copy_row(std::byte* strided, std::byte* contiguous, std::size_t elements, std::int64_t stride) {
  for (std::size_t i = 0; i < elements; ++i, strided += stride, contiguous += sizeof(Element)) {
    if constexpr (kToContiguous)
      std::memcpy(contiguous, strided, sizeof(Element));
    else
      std::memcpy(strided, contiguous, sizeof(Element));
  }
}

template <bool kToContiguous>
void copy(const StridedView& view, std::byte* contiguous) {
  const std::size_t element = dtype_size(view.dtype);
  for_each_row(view, contiguous,
               [&](std::byte* strided, std::byte* flat, std::size_t elements, std::int64_t stride) {
                 if (stride == static_cast<std::int64_t>(element)) {
                   if constexpr (kToContiguous)
                     copy_bytes(flat, strided, elements * element);
                   else
                     copy_bytes(strided, flat, elements * element);
                 } else if (element == 1) {
                   copy_row<std::uint8_t, kToContiguous>(strided, flat, elements, stride);
                 } else if (element == 2) {
                   copy_row<std::uint16_t, kToContiguous>(strided, flat, elements, stride);
                 } else if (element == 4) {
                   copy_row<std::uint32_t, kToContiguous>(strided, flat, elements, stride);
                 } else if (element == 8) {
                   copy_row<std::uint64_t, kToContiguous>(strided, flat, elements, stride);
                 } else {
                   copy_row<std::array<std::uint64_t, 2>, kToContiguous>(strided, flat, elements, stride);
                 }
               });
}

/// Changes the sign of `count` floating-point numbers, which in all formats is the highest bit; they begin
/// `bytes` apart, and have `size` bytes each.
void negate(std::byte* data, std::size_t count, std::size_t bytes, std::size_t size) {
  for (std::byte* sign = data + size - 1; count > 0; --count, sign += bytes) *sign ^= std::byte{0x80};
}

/// Makes the elements of `view` of what its memory holds, and the reverse, which is the same.
void change_signs(const StridedView& view, std::byte* contiguous) {
  const std::size_t element = dtype_size(view.dtype);
  const std::size_t number = is_complex(view.dtype) ? element / 2 : element;
  if (view.is_negated) negate(contiguous, view.count(), element, number);
  if (is_complex(view.dtype) && view.is_negated != view.is_conjugated)
    negate(contiguous + number, view.count(), element, number);
}

std::size_t bytes_of(std::span<const StridedView> views) {
  std::size_t bytes = 0;
  for (const StridedView& view : views) bytes += view.bytes();
  return bytes;
}

std::unique_ptr<std::byte[]> room_for(std::size_t bytes) {
  return std::make_unique_for_overwrite<std::byte[]>(std::max<std::size_t>(bytes, 1));
}

}  // namespace

std::size_t StridedView::count() const {
  std::size_t count = 1;
  for (int dim = 0; dim < dims; ++dim)
    count *= static_cast<std::size_t>(shape[static_cast<std::size_t>(dim)]);
  return count;
}

const std::byte* StridedView::lowest() const {
  const std::byte* lowest = data;
  for (std::size_t dim = 0; dim < static_cast<std::size_t>(dims); ++dim)
    if (strides[dim] < 0) lowest += (shape[dim] - 1) * strides[dim];
  return lowest;
}

std::size_t StridedView::extent() const {
  if (count() == 0) return 0;
  std::size_t extent = dtype_size(dtype);
  for (std::size_t dim = 0; dim < static_cast<std::size_t>(dims); ++dim)
    extent += static_cast<std::size_t>((shape[dim] - 1) * std::abs(strides[dim]));
  return extent;
}

bool StridedView::may_overlap_itself() const {
  std::vector<std::pair<std::int64_t, std::int64_t>> steps;  // stride, extent
  for (std::size_t dim = 0; dim < static_cast<std::size_t>(dims); ++dim) {
    if (shape[dim] == 0) return false;
    if (shape[dim] > 1) steps.emplace_back(std::abs(strides[dim]), shape[dim]);
  }
  std::ranges::sort(steps);
  auto span = static_cast<std::int64_t>(dtype_size(dtype));  // of what the smaller steps reach
  for (const auto& [stride, extent] : steps) {
    if (stride < span) return true;
    span += stride * (extent - 1);
  }
  return false;
}

void StridedView::copy_to(std::byte* contiguous) const {
  copy<true>(*this, contiguous);
  change_signs(*this, contiguous);
}

void StridedView::copy_from(const std::byte* contiguous) const {
  if (!is_negated && !is_conjugated) return copy<false>(*this, const_cast<std::byte*>(contiguous));
  const auto stored = room_for(bytes());
  copy_bytes(stored.get(), contiguous, bytes());
  change_signs(*this, stored.get());
  copy<false>(*this, stored.get());
}

void read_strided(Operation& operation) {
  StridedArrays& arrays = *operation.strided;
  if (!arrays.inputs.empty()) {
    arrays.input = room_for(bytes_of(arrays.inputs));
    std::byte* next = arrays.input.get();
    for (const StridedView& view : arrays.inputs) {
      view.copy_to(next);
      next += view.bytes();
    }
    operation.input = arrays.input.get();
  }
  if (arrays.outputs.empty()) return;
  operation.output_bytes = bytes_of(arrays.outputs);
  arrays.output = room_for(operation.output_bytes);
  operation.output = arrays.output.get();
}

void write_strided(Operation& operation) {
  StridedArrays& arrays = *operation.strided;
  const std::byte* next = arrays.output.get();
  for (const StridedView& view : arrays.outputs) {
    view.copy_from(next);
    next += view.bytes();
  }
  arrays.input.reset();
  arrays.output.reset();
}

}  // namespace multiring
