#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/arithmetic/dtype.h"
#include "binding/arrays/exchange.h"
#include "collective/operation.h"
#include "device/devices.h"

namespace multiring::binding {

namespace py = pybind11;

/// The memory of a Python array, by buffer protocol, DLPack or the CUDA array interface without a copy, held
/// until destroyed. Create and destroy with the GIL held.
class ArrayView {
 public:
  ArrayView() = default;
  /// Raises a usage error that names the object's type if it is no array of a known dtype, lies where nothing
  /// here can reach it, or its memory does not hold all its elements.
  ArrayView(py::handle object, bool writable);
  ~ArrayView();
  ArrayView(ArrayView&& other) noexcept;
  ArrayView& operator=(ArrayView&& other) noexcept;

  /// Where the elements are.
  const Buffer& memory() const { return memory_; }
  std::byte* data() const { return memory_.address; }
  DType dtype() const { return dtype_; }
  int dims() const { return dims_; }
  std::uint64_t extent(int dim) const { return shape_[static_cast<std::size_t>(dim)]; }
  std::uint64_t count() const { return count_; }
  std::size_t bytes() const { return count_ * dtype_size(dtype_); }
  /// Whether the elements, and not their negatives, lie one after the other in C order.
  bool contiguous() const { return contiguous_; }
  /// The array as one that need not be contiguous; a usage error where it is on a device.
  StridedView strided() const;
  /// Writes dtype, shape and extents into a descriptor, whose kind is set.
  void describe_in(Descriptor& descriptor) const;

 private:
  void take_buffer(py::handle object, bool writable);
  void take_dlpack(py::handle object, bool writable);
  void take_capsule(py::handle object);
  void take_tensor(py::handle object, const dlpack::Tensor& tensor);
  void take_from_device(py::handle object, bool writable, const Buffer& where, const Devices& devices);
  bool take_cuda_interface(py::handle object, bool writable, const Devices& devices);
  void take_array_interface(py::handle object, bool writable);
  void set_layout(int dims, const std::int64_t* shape, const std::int64_t* byte_strides);
  void release();
  StridedView described() const;
  void require_memory(py::handle object);

  Py_buffer buffer_{};   // held if buffer_.obj is set
  SharedTensor shared_;  // else this
  py::object owner_;     // else the DLPack capsule or the array
  py::object storage_;   // of a tensor, whose program may give it another one meanwhile
  Buffer memory_;
  DType dtype_ = DType::kUInt8;
  int dims_ = 0;
  std::array<std::uint64_t, Descriptor::kMaxDims> shape_{};
  std::array<std::int64_t, Descriptor::kMaxDims> strides_{};  // in bytes
  std::uint64_t count_ = 0;
  bool contiguous_ = true;
  bool is_negated_ = false;
  bool is_conjugated_ = false;
};

/// Whether two contiguous arrays share memory without beginning at the same element.
bool overlap_in_part(const ArrayView& a, const ArrayView& b);

[[noreturn]] void throw_usage(const std::string& message);

}  // namespace multiring::binding
