// In integers, so that it does not depend on the thread's rounding mode and treatment of subnormal numbers,
// and compilers make vectors of it on any processor.

#include "base/half.h"

#include <bit>
#include <cstdint>
#include <cstring>

namespace multiring {
namespace {

template <class To, class From, class Convert>
void convert_all(const void* input, void* output, std::size_t count, const Convert& convert) {
  const auto* from = static_cast<const std::byte*>(input);
  auto* to = static_cast<std::byte*>(output);
  for (std::size_t index = 0; index < count; ++index) {
    From value;
    std::memcpy(&value, from + index * sizeof(From), sizeof(From));
    const To converted = convert(value);
    std::memcpy(to + index * sizeof(To), &converted, sizeof(To));
  }
}

std::uint32_t float16_to_float32(std::uint16_t half) {
  const std::uint32_t magnitude = half & 0x7fffU;
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t normal = (magnitude << 13) + (112U << 23);  // the exponent's bias is 112 lower
  const auto subnormal = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24F);
  const std::uint32_t special = (magnitude << 13) | 0x7f800000U;
  return sign | (magnitude >= 0x7c00U ? special : magnitude >= 0x400U ? normal : subnormal);
}

std::uint16_t float32_to_float16(std::uint32_t bits) {
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  // Half of the last place that is kept, less one if that is even: ties go to even.
  const std::uint32_t normal = (magnitude + 0xfffU + ((magnitude >> 13) & 1U) - (112U << 23)) >> 13;
  // Subnormal: the last place is 2^-24 whatever the number, so the shift depends on it.
  const std::uint32_t exponent = magnitude >> 23;
  const std::uint32_t shift = exponent >= 102U ? 126U - exponent : 24U;
  const std::uint32_t mantissa = (magnitude & 0x7fffffU) | 0x800000U;
  const std::uint32_t kept = shift > 24U ? 0U : mantissa >> shift;
  const std::uint32_t rest = mantissa & ((1U << (shift & 31U)) - 1U);
  const std::uint32_t middle = 1U << ((shift - 1U) & 31U);
  const std::uint32_t up = rest > middle || (rest == middle && (kept & 1U) != 0U) ? 1U : 0U;
  const std::uint32_t subnormal = exponent < 102U ? 0U : kept + up;
  std::uint32_t result = magnitude < 0x38800000U ? subnormal : normal;
  result = magnitude >= 0x477ff000U ? 0x7c00U : result;  // from the middle between the largest and 2^16 on
  if (magnitude > 0x7f800000U) return 0x7e00U;
  return static_cast<std::uint16_t>(sign | result);
}

std::uint16_t float32_to_bfloat16(std::uint32_t bits) {
  if ((bits & 0x7fffffffU) > 0x7f800000U) return 0x7fc0U;
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

}  // namespace

void widen(DType half, const void* input, void* output, std::size_t count) {
  if (half == DType::kFloat16)
    return convert_all<std::uint32_t, std::uint16_t>(input, output, count, float16_to_float32);
  convert_all<std::uint32_t, std::uint16_t>(
      input, output, count, [](std::uint16_t value) { return static_cast<std::uint32_t>(value) << 16; });
}

void narrow(DType half, const void* input, void* output, std::size_t count) {
  if (half == DType::kFloat16)
    return convert_all<std::uint16_t, std::uint32_t>(input, output, count, float32_to_float16);
  convert_all<std::uint16_t, std::uint32_t>(input, output, count, float32_to_bfloat16);
}

}  // namespace multiring
