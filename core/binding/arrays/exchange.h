#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "binding/arrays/dlpack.h"

namespace multiring::binding {

/// Whether the memory holds the negatives of the elements, of which DLPack does not tell.
bool holds_negatives(PyObject* object);
/// Whether the memory of a tensor of complex numbers holds their conjugates.
bool holds_conjugates(PyObject* object);

/// The memory that a tensor's storage has now, of which the tensor's own extents do not tell.
struct Storage {
  static constexpr std::size_t kUnknown = SIZE_MAX;

  const std::byte* data;
  std::size_t bytes;       ///< kUnknown: the array has no memory, because it stands for others
  pybind11::object owner;  ///< keeps the memory, whatever the tensor gets in its place

  bool holds(const std::byte* begin, std::size_t extent) const {
    return begin >= data && extent <= bytes && begin - data <= static_cast<std::ptrdiff_t>(bytes - extent);
  }
};

/// The storage of an array by `untyped_storage()`; none where its library has no such thing.
std::optional<Storage> storage_of(PyObject* object);

/// Whether the storage of a tensor in host memory has all its elements.
bool is_stored(PyObject* object, const dlpack::Tensor& tensor);

/// The address of a tensor's first element by its own `data_ptr()`; null: it tells none.
const std::byte* data_of(PyObject* object);

/// Address, dtype and layout of an array in the host's memory, by DLPack's exchange API: no Python object is
/// made and no reference taken, so it holds as long as the caller's reference and the array is left as it is.
///
/// False, and no Python error: the array's own type (a base of it does not count: what else a derived class
/// means by its arrays is not known here) has no such API, the array lies elsewhere or requires a gradient,
/// its memory holds something else than its elements, or its storage not all of them.
bool describe_plainly(PyObject* object, dlpack::Tensor* tensor);

/// The first element of an array in the host's memory whose own type has that API, whatever else it is; 0:
/// none.
std::uintptr_t host_address(PyObject* object);

/// Whether the elements lie one after the other in C order.
bool in_c_order(const dlpack::Tensor& tensor);

struct DeleteTensor {
  void operator()(dlpack::VersionedTensor* tensor) const {
    if (tensor->deleter != nullptr) tensor->deleter(tensor);
  }
};
using SharedTensor = std::unique_ptr<dlpack::VersionedTensor, DeleteTensor>;

/// Describes an array as describe_plainly does, whether or not its storage has all its elements (is_stored).
/// The memory stays as long as the result, whatever becomes of the array. Null: the array cannot be
/// described.
SharedTensor share_plainly(PyObject* object);

}  // namespace multiring::binding
