#pragma once

#include <pybind11/pybind11.h>

namespace multiring::binding {

void bind_tensor_gradients(pybind11::module_& module);

}  // namespace multiring::binding
