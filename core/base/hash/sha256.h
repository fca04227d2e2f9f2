#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "base/export.h"

namespace multiring {

using Sha256Digest = std::array<std::byte, 32>;

/// SHA-256 (FIPS 180-4), for proofs that a secret is known. Not meant for bulk data.
class MULTIRING_API Sha256 {
 public:
  Sha256();
  void update(std::span<const std::byte> bytes);
  /// The digest of all that was given; the object is of no use afterwards.
  Sha256Digest finish();

 private:
  static constexpr std::size_t kBlock = 64;
  void compress(const std::byte* block);

  std::array<std::uint32_t, 8> state_;
  std::array<std::byte, kBlock> pending_;
  std::size_t pending_bytes_ = 0;
  std::uint64_t total_bytes_ = 0;
};

/// HMAC-SHA256 (RFC 2104) of the message that `parts` make one after the other.
MULTIRING_API Sha256Digest hmac_sha256(std::span<const std::byte> key,
                                       std::initializer_list<std::span<const std::byte>> parts);

/// Takes as long for spans that differ at their beginning as for equal ones, so that a guess cannot be
/// improved by timing it. Spans of different lengths are unequal.
MULTIRING_API bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b);

}  // namespace multiring
