#pragma once

#include <pybind11/pybind11.h>

namespace multiring::binding {

void bind_communicator(pybind11::module_& module);
void bind_probe(pybind11::module_& module);
void bind_named_queue(pybind11::module_& module);
void bind_connect(pybind11::module_& module);
void bind_network(pybind11::module_& module);
void bind_plan(pybind11::module_& module);

}  // namespace multiring::binding
