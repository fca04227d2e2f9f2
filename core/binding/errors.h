#pragma once

#include <pybind11/pybind11.h>

#include "base/error.h"

namespace multiring::binding {

/// The counterpart of an error in multiring.errors.
pybind11::object exception_of(const Error& error);

/// Makes every C++ error of the tree raise its counterpart in multiring.errors.
void register_errors();

}  // namespace multiring::binding
