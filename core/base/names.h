#pragma once

#include <cstddef>

namespace multiring {

/// The name of an enum's value; `names` are in the order of the values, from 0.
template <class Enum, std::size_t N>
constexpr const char* name_in(const char* const (&names)[N], Enum value, const char* otherwise) {
  const auto index = static_cast<std::size_t>(value);
  return index < N ? names[index] : otherwise;
}

}  // namespace multiring
