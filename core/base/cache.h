#pragma once

#include <cstddef>

namespace multiring {

/// Bytes that processors pass to each other as one.
inline constexpr std::size_t kCacheLine = 64;
/// Elements of which a few arrays stay in the first cache: what passes through several steps does so by so
/// many.
inline constexpr std::size_t kCachedElements = 1024;

/// The least multiple of `multiple` that is not below `bytes`.
constexpr std::size_t round_up(std::size_t bytes, std::size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

}  // namespace multiring
