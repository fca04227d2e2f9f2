#include "base/hash/checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace multiring {
namespace {

constexpr std::size_t kLanes = 4;  // independent of each other, so that multiplications overlap
constexpr std::uint64_t kFactor = 0x9e3779b97f4a7c15;

std::uint64_t mix(std::uint64_t sum, std::uint64_t word) {
  return std::rotl(sum ^ (word * kFactor), 27) * kFactor + 1;
}

}  // namespace

std::uint64_t checksum(const void* data, std::size_t bytes, std::uint64_t seed) {
  const auto* from = static_cast<const std::byte*>(data);
  std::uint64_t lanes[kLanes] = {seed, seed + 1, seed + 2, seed + 3};
  std::size_t at = 0;
  for (; at + sizeof lanes <= bytes; at += sizeof lanes) {
    std::uint64_t words[kLanes];
    std::memcpy(words, from + at, sizeof words);
    for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = mix(lanes[i], words[i]);
  }
  for (; at < bytes; at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, from + at, std::min(sizeof word, bytes - at));
    lanes[0] = mix(lanes[0], word);
  }
  std::uint64_t sum = mix(bytes, lanes[0]);
  for (std::size_t i = 1; i < kLanes; ++i) sum = mix(sum, lanes[i]);
  return sum;
}

}  // namespace multiring
