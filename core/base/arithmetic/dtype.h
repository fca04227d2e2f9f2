#pragma once

#include <cstddef>
#include <cstdint>

#include "base/export.h"

namespace multiring {

/// Element types that every collective carries. The values are part of the C ABI (multiring.h).
enum class DType : std::uint8_t {
  kBool = 0,
  kInt8 = 1,
  kUInt8 = 2,
  kInt16 = 3,
  kUInt16 = 4,
  kInt32 = 5,
  kUInt32 = 6,
  kInt64 = 7,
  kUInt64 = 8,
  kFloat16 = 9,
  kBFloat16 = 10,
  kFloat32 = 11,
  kFloat64 = 12,
  kComplex64 = 13,   ///< a pair of float32: the real part, then the imaginary one
  kComplex128 = 14,  ///< a pair of float64
};
inline constexpr int kDTypeCount = 15;

/// Bytes of one element.
MULTIRING_API std::size_t dtype_size(DType dtype);
/// NumPy's name of the type ("float32", "bfloat16", ...).
MULTIRING_API const char* dtype_name(DType dtype);
/// Whether an element is a floating-point number, or a pair of them.
MULTIRING_API bool is_floating(DType dtype);
constexpr bool is_complex(DType dtype) { return dtype == DType::kComplex64 || dtype == DType::kComplex128; }

}  // namespace multiring
