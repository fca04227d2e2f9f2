#pragma once

#include <pybind11/pybind11.h>

namespace multiring::binding {

/// Makes every C++ error of the tree raise its counterpart in multiring.errors.
void register_errors();

}  // namespace multiring::binding
