#pragma once

#include <cstddef>

#include "base/arithmetic/dtype.h"
#include "base/export.h"

namespace multiring {

/// Whether values of the type are computed with in float32: float16 and bfloat16.
constexpr bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

/// Converts `count` values of a half-precision type to float32, which is exact; a NaN becomes the positive
/// quiet one. Nothing has to be aligned.
MULTIRING_API void widen(DType half, const void* input, void* output, std::size_t count);
/// Converts `count` float32 values to a half-precision type, rounded to nearest even; what is too
/// large becomes infinite, and a NaN the positive quiet one. The bits do not depend on the processor or the
/// thread's rounding mode. Nothing has to be aligned.
MULTIRING_API void narrow(DType half, const void* input, void* output, std::size_t count);

}  // namespace multiring
