#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/communicator.h"

namespace multiring::binding {

/// A communicator as Python objects hold it: let go of with the GIL held.
std::shared_ptr<Communicator> held_by_python(std::shared_ptr<Communicator> communicator);

void bind_communicator(pybind11::module_& module);
void bind_connect(pybind11::module_& module);

}  // namespace multiring::binding
