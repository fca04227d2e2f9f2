#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "binding/arrays/array_view.h"
#include "collective/operation.h"

namespace multiring::binding {

/// An operation being put together by the Python face, with the arrays it works on.
struct PyOperation {
  Operation operation;
  std::shared_ptr<std::vector<ArrayView>> views = std::make_shared<std::vector<ArrayView>>();
  py::object owners;  ///< of the pieces

  /// Sets the array that the operation reads. False: it is on a device, and not contiguous; nothing was done.
  bool set_input(py::handle array, bool is_copied);
  /// Sets the array that the operation writes. False: it is on a device, and not contiguous; nothing was
  /// done.
  bool set_output(py::handle array);
  /// Sets arrays in host memory of which one after the other is the input, as an array of this shape.
  void set_inputs(const std::vector<py::object>& arrays, const std::vector<std::uint64_t>& shape);
  /// Sets arrays in host memory that get the output, one after the other.
  void set_outputs(const std::vector<py::object>& arrays);

 private:
  StridedArrays& strided();
  /// Adds an array and holds it.
  void add(std::vector<StridedView>& to, ArrayView view);
};

/// Fills in what allreduce needs. False: an array is not contiguous, nothing was done.
bool prepare_allreduce(PyOperation& prepared, py::handle input, py::handle output, std::string_view name);

/// How an allreduce crosses from host to host.
using Crossing = std::pair<CommDtype, Order>;

void set_reduction(PyOperation& operation, ReduceOp op, double prescale, double postscale, Crossing crossing);

void bind_operation(py::module_& module);

}  // namespace multiring::binding
