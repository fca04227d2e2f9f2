#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/arithmetic/dtype.h"
#include "base/export.h"

namespace multiring {

/// The dtype that an allreduce of float32 sends between hosts: half precision takes half the time (ADR 15).
enum class CommDtype : std::uint8_t {
  kDefault = 0,  ///< the communicator's; an operation without the choice sends its own dtype
  kFloat32 = 1,
  kFloat16 = 2,
  kBFloat16 = 3,
};
inline constexpr int kCommDtypeCount = 4;

/// "default", "float32", "float16", "bfloat16".
MULTIRING_API const char* comm_dtype_name(CommDtype comm_dtype);
/// The one with this name, except the default; empty: there is none.
MULTIRING_API std::optional<CommDtype> find_comm_dtype(std::string_view name);
constexpr bool is_rounded(CommDtype comm_dtype) {
  return comm_dtype == CommDtype::kFloat16 || comm_dtype == CommDtype::kBFloat16;
}
constexpr DType rounded_dtype(CommDtype comm_dtype) {
  return comm_dtype == CommDtype::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
}

}  // namespace multiring
