#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "base/arithmetic/dtype.h"
#include "binding/arrays/dlpack.h"

namespace multiring::binding {

// These functions translate the names that array protocols have for dtypes. They return nothing for a dtype
// that the core does not have.

/// Translates the struct-module format of one element, in native byte order only. NumPy's complex numbers are
/// "Zf" and "Zd".
std::optional<DType> format_dtype(const char* format, std::size_t bytes);
/// Translates a "typestr" of the array interfaces: byte order, kind, bytes.
std::optional<DType> typestr_dtype(const std::string& text);
/// Translates a data type of DLPack.
std::optional<DType> dlpack_dtype(const dlpack::DataType& type);

}  // namespace multiring::binding
