#include "base/arithmetic/dtype.h"

#include <stdexcept>
#include <string>

namespace multiring {
namespace {

struct DTypeInfo {
  std::size_t size;
  const char* name;
  bool floating;
};

constexpr DTypeInfo kInfo[kDTypeCount] = {
    {1, "bool", false},   {1, "int8", false},     {1, "uint8", false},      {2, "int16", false},
    {2, "uint16", false}, {4, "int32", false},    {4, "uint32", false},     {8, "int64", false},
    {8, "uint64", false}, {2, "float16", true},   {2, "bfloat16", true},    {4, "float32", true},
    {8, "float64", true}, {8, "complex64", true}, {16, "complex128", true},
};

const DTypeInfo& info(DType dtype) {
  const int index = static_cast<int>(dtype);
  if (index >= kDTypeCount) throw std::invalid_argument("unknown dtype number " + std::to_string(index));
  return kInfo[index];
}

}  // namespace

std::size_t dtype_size(DType dtype) { return info(dtype).size; }
const char* dtype_name(DType dtype) { return info(dtype).name; }
bool is_floating(DType dtype) { return info(dtype).floating; }

}  // namespace multiring
