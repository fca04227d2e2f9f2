#include "support/oracles/reduce_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <type_traits>

namespace multiring::testing {
namespace {

/// An IEEE format of 16 bits; conversions in plain arithmetic, not in bits like those under test.
struct HalfFormat {
  int mantissa_bits;
  int smallest_exponent;  // of a normal number

  int exponent_bits() const { return 15 - mantissa_bits; }
  int infinity() const { return ((1 << exponent_bits()) - 1) << mantissa_bits; }

  float decode(std::uint16_t bits) const {
    const int magnitude = bits & 0x7fff;
    const float sign = bits & 0x8000 ? -1.0f : 1.0f;
    if (magnitude > infinity()) return std::numeric_limits<float>::quiet_NaN();
    if (magnitude == infinity()) return sign * std::numeric_limits<float>::infinity();
    const int exponent = magnitude >> mantissa_bits;
    const int mantissa = magnitude & ((1 << mantissa_bits) - 1);
    const int whole = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
    const int shift = smallest_exponent - mantissa_bits + (exponent == 0 ? 0 : exponent - 1);
    return sign * std::ldexp(static_cast<float>(whole), shift);
  }

  std::uint16_t encode(double value) const {
    const int sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return static_cast<std::uint16_t>(infinity() | (1 << (mantissa_bits - 1)));
    if (std::isinf(value)) return static_cast<std::uint16_t>(sign | infinity());
    if (value == 0) return static_cast<std::uint16_t>(sign);
    int exponent = std::max(std::ilogb(value), smallest_exponent);
    // nearbyint rounds to nearest even; a mantissa that rounds up to the next power of two carries into the
    // exponent, at the very top into infinity.
    const int mantissa =
        static_cast<int>(std::nearbyint(std::ldexp(std::fabs(value), mantissa_bits - exponent)));
    const int bits = ((exponent - smallest_exponent) << mantissa_bits) + mantissa;
    return static_cast<std::uint16_t>(sign | std::min(bits, infinity()));
  }
};

constexpr HalfFormat kFloat16{10, -14};
constexpr HalfFormat kBFloat16{7, -126};

template <const HalfFormat& kFormat>
struct Half {
  std::uint16_t bits;
};
using Float16 = Half<kFloat16>;
using BFloat16 = Half<kBFloat16>;

template <typename T>
struct Element {
  using Compute = T;
  static T widen(T x) { return x; }
  static T narrow(T x) { return x; }
};
template <const HalfFormat& kFormat>
struct Element<Half<kFormat>> {
  using Compute = float;
  static float widen(Half<kFormat> x) { return kFormat.decode(x.bits); }
  static Half<kFormat> narrow(double x) { return {kFormat.encode(x)}; }
};

template <typename T>
T scaled(T x, double factor) {
  if (factor == 1.0) return x;
  if constexpr (std::is_floating_point_v<T>) {
    return x * static_cast<T>(factor);
  } else {
    const double product = std::trunc(static_cast<double>(x) * factor);
    if (std::isnan(product)) return 0;
    if (product <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
    if (product >= std::ldexp(1.0, std::numeric_limits<T>::digits)) return std::numeric_limits<T>::max();
    return static_cast<T>(product);
  }
}

template <typename T>
T combined(ReduceOp op, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    if (op == ReduceOp::kBitwiseAnd) return static_cast<T>(a & b);
    if (op == ReduceOp::kBitwiseOr) return static_cast<T>(a | b);
    if (op == ReduceOp::kBitwiseXor) return static_cast<T>(a ^ b);
  }
  if constexpr (std::is_same_v<T, bool>) {
    return op == ReduceOp::kSum || op == ReduceOp::kMax ? a || b : a && b;
  } else {
    if constexpr (std::is_floating_point_v<T>) {
      if (op == ReduceOp::kMin || op == ReduceOp::kMax) {
        if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
      }
    }
    using Wide = std::conditional_t<std::is_floating_point_v<T>, T, std::uint64_t>;
    switch (op) {
      case ReduceOp::kMin:
        return b < a ? b : a;
      case ReduceOp::kMax:
        return b > a ? b : a;
      case ReduceOp::kProduct:
        return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
      default:
        return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
    }
  }
}

template <typename T>
T tree(ReduceOp op, const std::vector<T>& leaves, std::size_t lo, std::size_t hi) {
  if (hi - lo == 1) return leaves[lo];
  std::size_t p = 1;
  while (2 * p < hi - lo) p *= 2;
  return combined(op, tree(op, leaves, lo, lo + p), tree(op, leaves, lo + p, hi));
}

template <typename E>
Bytes reduce_elements(const Reduction& reduction, const std::vector<Bytes>& inputs) {
  using T = typename Element<E>::Compute;
  Bytes result(inputs[0].size());
  std::vector<T> leaves(inputs.size());
  for (std::size_t at = 0; at < result.size(); at += sizeof(E)) {
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      E stored;
      std::memcpy(&stored, &inputs[k][at], sizeof(E));
      leaves[k] = scaled(Element<E>::widen(stored), reduction.prescale);
    }
    T value{};
    if constexpr (std::is_integral_v<T>) {
      if (reduction.op == ReduceOp::kAverage) {
        const __int128 sum = std::accumulate(leaves.begin(), leaves.end(), static_cast<__int128>(0));
        value = static_cast<T>(sum / static_cast<__int128>(inputs.size()));
      } else {
        value = tree<T>(reduction.op, leaves, 0, leaves.size());
      }
    } else {
      value = tree<T>(reduction.op, leaves, 0, leaves.size());
      if (reduction.op == ReduceOp::kAverage) value /= static_cast<T>(inputs.size());
    }
    value = scaled(value, reduction.postscale);
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(value)) value = std::numeric_limits<T>::quiet_NaN();
    }
    const E stored = Element<E>::narrow(value);
    std::memcpy(&result[at], &stored, sizeof(E));
  }
  return result;
}

/// Calls f with a value of the type at `index` in the list.
template <typename First, typename... Rest, typename F>
auto dispatch_in(std::size_t index, F f) {
  if constexpr (sizeof...(Rest) > 0)
    if (index > 0) return dispatch_in<Rest...>(index - 1, f);
  return f(First{});
}

/// Calls f with a value of the C++ type of the elements.
template <typename F>
auto dispatch(DType dtype, F f) {
  return dispatch_in<bool, std::int8_t, std::uint8_t, std::int16_t, std::uint16_t, std::int32_t,
                     std::uint32_t, std::int64_t, std::uint64_t, Float16, BFloat16, float, double>(
      static_cast<std::size_t>(dtype), f);
}

/// The element that holds `value`, rounded to nearest even or saturated.
template <typename E>
E stored(double value) {
  if constexpr (std::is_class_v<E>) {
    return Element<E>::narrow(value);
  } else if constexpr (std::is_integral_v<E> && !std::is_same_v<E, bool>) {
    return scaled<E>(1, value);
  } else {
    return static_cast<E>(value);
  }
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();
/// The fifth is a denormal of float32 and bfloat16, the sixth one of float16, and the seventh the last that
/// rounds to a finite float16.
constexpr double kSpecial[] = {0.0,   -0.0, kInfinity, -kInfinity,
                               1e-40, 3e-7, 65519.0,   std::numeric_limits<double>::quiet_NaN()};

template <typename E>
E random_element(std::mt19937& random, bool special) {
  std::normal_distribution<double> ordinary(0.0, std::is_integral_v<E> ? 50.0 : 2.0);
  const auto choice = static_cast<std::uint32_t>(random());
  if constexpr (std::is_same_v<E, bool>) return choice & 1;
  if (!special || choice % 4 != 0) return stored<E>(ordinary(random));
  if (choice & 16) return stored<E>(kSpecial[(choice >> 8) % std::size(kSpecial)]);
  const std::uint64_t bits = static_cast<std::uint64_t>(random()) << 32 | random();
  E any;
  std::memcpy(&any, &bits, sizeof(E));
  return any;
}

}  // namespace

Bytes reduce_oracle(DType dtype, const Reduction& reduction, const std::vector<Bytes>& inputs) {
  const bool unchanged = inputs.size() == 1 && reduction.prescale == 1.0 && reduction.postscale == 1.0;
  if (unchanged) return inputs[0];
  return dispatch(number_type(dtype), [&]<typename E>(E) { return reduce_elements<E>(reduction, inputs); });
}

double value_at(DType dtype, const Bytes& bytes, std::size_t index) {
  return dispatch(number_type(dtype), [&]<typename E>(E) {
    E at;
    std::memcpy(&at, &bytes[index * sizeof(E)], sizeof(E));
    return static_cast<double>(Element<E>::widen(at));
  });
}

Bytes random_elements(DType dtype, std::size_t count, std::uint32_t seed, bool special) {
  return dispatch(number_type(dtype), [&]<typename E>(E) {
    std::mt19937 random(seed);
    Bytes bytes(count * dtype_size(dtype));
    for (std::size_t i = 0; i < bytes.size() / sizeof(E); ++i) {
      const E one = random_element<E>(random, special);
      std::memcpy(&bytes[i * sizeof(E)], &one, sizeof(E));
    }
    return bytes;
  });
}

}  // namespace multiring::testing
