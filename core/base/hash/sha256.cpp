#include "base/hash/sha256.h"

#include <algorithm>
#include <bit>

namespace multiring {
namespace {

constexpr std::array<std::uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t load_big_endian(const std::byte* from) {
  std::uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = (value << 8U) | std::to_integer<std::uint32_t>(from[i]);
  return value;
}

}  // namespace

Sha256::Sha256()
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19},
      pending_{} {}

void Sha256::compress(const std::byte* block) {
  std::array<std::uint32_t, 64> w;
  for (std::size_t i = 0; i < 16; ++i) w[i] = load_big_endian(block + 4 * i);
  for (std::size_t i = 16; i < 64; ++i) {
    const std::uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3U);
    const std::uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10U);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (std::size_t i = 0; i < 64; ++i) {
    const std::uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRoundConstants[i] + w[i];
    const std::uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<std::uint32_t, 8> added = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < added.size(); ++i) state_[i] += added[i];
}

void Sha256::update(std::span<const std::byte> bytes) {
  total_bytes_ += bytes.size();
  while (!bytes.empty()) {
    if (pending_bytes_ == 0 && bytes.size() >= kBlock) {
      compress(bytes.data());
      bytes = bytes.subspan(kBlock);
      continue;
    }
    const std::size_t taken = std::min(kBlock - pending_bytes_, bytes.size());
    std::copy_n(bytes.begin(), taken, pending_.begin() + static_cast<std::ptrdiff_t>(pending_bytes_));
    pending_bytes_ += taken;
    bytes = bytes.subspan(taken);
    if (pending_bytes_ < kBlock) return;
    compress(pending_.data());
    pending_bytes_ = 0;
  }
}

Sha256Digest Sha256::finish() {
  // A one bit, zeros up to 8 bytes before the end of a block, and the length in bits.
  const std::uint64_t bits = total_bytes_ * 8;
  std::array<std::byte, kBlock + 8> tail{std::byte{0x80}};
  const std::size_t zeros = (kBlock + kBlock - 8 - 1 - pending_bytes_) % kBlock;
  for (std::size_t i = 0; i < 8; ++i) tail[1 + zeros + i] = static_cast<std::byte>(bits >> (56 - 8 * i));
  update(std::span(tail).first(1 + zeros + 8));
  Sha256Digest digest;
  for (std::size_t i = 0; i < digest.size(); ++i)
    digest[i] = static_cast<std::byte>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Sha256Digest hmac_sha256(std::span<const std::byte> key,
                         std::initializer_list<std::span<const std::byte>> parts) {
  std::array<std::byte, 64> block{};
  if (key.size() > block.size()) {
    Sha256 hash;
    hash.update(key);
    const Sha256Digest digest = hash.finish();
    std::copy(digest.begin(), digest.end(), block.begin());
  } else {
    std::copy(key.begin(), key.end(), block.begin());
  }
  for (std::byte& byte : block) byte ^= std::byte{0x36};
  Sha256 inner;
  inner.update(block);
  for (const auto part : parts) inner.update(part);
  const Sha256Digest digest = inner.finish();
  for (std::byte& byte : block) byte ^= std::byte{0x36} ^ std::byte{0x5c};
  Sha256 outer;
  outer.update(block);
  outer.update(digest);
  return outer.finish();
}

bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (a.size() != b.size()) return false;
  std::byte difference{0};
  for (std::size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == std::byte{0};
}

}  // namespace multiring
