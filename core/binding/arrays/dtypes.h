#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "base/arithmetic/dtype.h"
#include "binding/arrays/dlpack.h"

namespace multiring::binding {

// What the protocols of arrays call a dtype; none: there is no such dtype here.

/// Of the struct-module format of one element, in native byte order only. NumPy's complex numbers are "Zf"
/// and "Zd".
std::optional<DType> format_dtype(const char* format, std::size_t bytes);
/// Of a "typestr" of the array interfaces: byte order, kind, bytes.
std::optional<DType> typestr_dtype(const std::string& text);
std::optional<DType> dlpack_dtype(const dlpack::DataType& type);

}  // namespace multiring::binding
