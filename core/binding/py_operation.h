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

  void set_input(py::handle array);
  void set_output(py::handle array);
};

/// Fills in what allreduce needs. False: an array is not contiguous, nothing was done.
bool prepare_allreduce(PyOperation& prepared, py::handle input, py::handle output, std::string_view name);

/// How an allreduce crosses from host to host.
using Crossing = std::pair<CommDtype, Order>;

void set_reduction(PyOperation& operation, ReduceOp op, double prescale, double postscale, Crossing crossing);

void bind_operation(py::module_& module);

}  // namespace multiring::binding
