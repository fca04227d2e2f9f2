#include "binding/arrays/dtypes.h"

#include <cstddef>
#include <cstring>

namespace multiring::binding {
namespace {

std::optional<DType> integer_dtype(bool is_signed, std::size_t bytes) {
  if (bytes == 1) return is_signed ? DType::kInt8 : DType::kUInt8;
  if (bytes == 2) return is_signed ? DType::kInt16 : DType::kUInt16;
  if (bytes == 4) return is_signed ? DType::kInt32 : DType::kUInt32;
  if (bytes == 8) return is_signed ? DType::kInt64 : DType::kUInt64;
  return std::nullopt;
}

std::optional<DType> floating_dtype(std::size_t bytes) {
  if (bytes == 2) return DType::kFloat16;
  if (bytes == 4) return DType::kFloat32;
  if (bytes == 8) return DType::kFloat64;
  return std::nullopt;
}

std::optional<DType> complex_dtype(std::size_t bytes) {
  if (bytes == 8) return DType::kComplex64;
  if (bytes == 16) return DType::kComplex128;
  return std::nullopt;
}

}  // namespace

std::optional<DType> format_dtype(const char* format, std::size_t bytes) {
  if (format == nullptr) return DType::kUInt8;
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  if (format[0] == 'Z' && (format[1] == 'f' || format[1] == 'd') && format[2] == '\0')
    return complex_dtype(bytes);
  if (format[0] == '\0' || format[1] != '\0') return std::nullopt;
  const char letter = format[0];
  if (letter == '?') return DType::kBool;
  if (std::strchr("efd", letter) != nullptr) return floating_dtype(bytes);
  if (std::strchr("bhilq", letter) != nullptr) return integer_dtype(true, bytes);
  if (std::strchr("BHILQ", letter) != nullptr) return integer_dtype(false, bytes);
  return std::nullopt;
}

std::optional<DType> typestr_dtype(const std::string& text) {
  if (text == "<c16") return DType::kComplex128;
  if (text.size() != 3 || (text[0] != '<' && text[0] != '|') || text[2] < '1' || text[2] > '8')
    return std::nullopt;
  const auto bytes = static_cast<std::size_t>(text[2] - '0');
  switch (text[1]) {
    case 'b':
      return bytes == 1 ? std::optional(DType::kBool) : std::nullopt;
    case 'i':
      return integer_dtype(true, bytes);
    case 'u':
      return integer_dtype(false, bytes);
    case 'f':
      return floating_dtype(bytes);
    case 'c':
      return complex_dtype(bytes);
    default:
      return std::nullopt;
  }
}

std::optional<DType> dlpack_dtype(const dlpack::DataType& type) {
  if (type.lanes != 1) return std::nullopt;
  const std::size_t bytes = type.bits / 8;
  switch (type.code) {
    case dlpack::kInt:
      return integer_dtype(true, bytes);
    case dlpack::kUInt:
      return integer_dtype(false, bytes);
    case dlpack::kFloat:
      return floating_dtype(bytes);
    case dlpack::kBfloat:
      return bytes == 2 ? std::optional(DType::kBFloat16) : std::nullopt;
    case dlpack::kComplex:
      return complex_dtype(bytes);
    case dlpack::kBool:
      return bytes == 1 ? std::optional(DType::kBool) : std::nullopt;
    default:
      return std::nullopt;
  }
}

}  // namespace multiring::binding
