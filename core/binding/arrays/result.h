#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "binding/arrays/dlpack.h"
#include "collective/operation.h"

namespace multiring::binding {

/// Memory that the core allocated for a result, with its dtype and shape.
class Result {
 public:
  /// Takes the result out of `operation`.
  explicit Result(Operation& operation);

  const std::vector<std::uint64_t>& received() const { return received_; }
  std::vector<std::uint64_t> shape() const { return shape_; }
  const char* dtype() const { return dtype_name(dtype_); }
  bool on_device() const;
  dlpack::Device dlpack_device() const;
  /// A NumPy array over the memory, which is that of the host; bfloat16 as uint16.
  pybind11::array numpy() const;
  /// A DLPack capsule over the memory, of its true dtype.
  pybind11::object dlpack() const;

 private:
  std::shared_ptr<ResultBuffer> buffer_;
  DType dtype_;
  std::vector<std::uint64_t> shape_;
  std::vector<std::uint64_t> received_;
};

pybind11::dtype numpy_dtype(DType dtype);

void bind_result(pybind11::module_& module);

}  // namespace multiring::binding
