#include "base/arithmetic/comm_dtype.h"

#include "base/names.h"

namespace multiring {

const char* comm_dtype_name(CommDtype comm_dtype) {
  static constexpr const char* kNames[] = {"default", "float32", "float16", "bfloat16"};
  return name_in(kNames, comm_dtype, "unknown");
}

std::optional<CommDtype> find_comm_dtype(std::string_view name) {
  for (int value = 1; value < kCommDtypeCount; ++value)
    if (const auto comm_dtype = static_cast<CommDtype>(value); name == comm_dtype_name(comm_dtype))
      return comm_dtype;
  return {};
}

}  // namespace multiring
