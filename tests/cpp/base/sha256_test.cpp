// SHA-256 against the vectors of FIPS 180-4 and its HMAC against those of RFC 4231.

#include "base/hash/sha256.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/text.h"

namespace multiring {
namespace {

std::string hex(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes) {
    text += kDigits[std::to_integer<unsigned>(byte) >> 4U];
    text += kDigits[std::to_integer<unsigned>(byte) & 15U];
  }
  return text;
}

std::string sha256(const std::string& text) {
  Sha256 hash;
  hash.update(bytes_of(text));
  return hex(hash.finish());
}

TEST(Sha256, KnownDigests) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesOfAnySizeGiveTheSameDigest) {
  for (std::size_t length = 0; length <= 200; ++length) {
    std::string text;
    for (std::size_t i = 0; i < length; ++i) text += static_cast<char>(i * 7 + length);
    for (const std::size_t piece : {1, 3, 63, 64, 65}) {
      Sha256 hash;
      for (std::size_t at = 0; at < length; at += piece) hash.update(bytes_of(text.substr(at, piece)));
      EXPECT_EQ(hex(hash.finish()), sha256(text)) << length << " bytes in pieces of " << piece;
    }
  }
}

struct HmacVector {
  std::string key;
  std::string data;
  std::string digest;
};

TEST(HmacSha256, VectorsOfRfc4231) {
  std::string counting;
  for (char c = 1; c <= 25; ++c) counting += c;
  const std::vector<HmacVector> vectors = {
      {std::string(20, '\x0b'), "Hi There",
       "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {"Jefe", "what do ya want for nothing?",
       "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {std::string(20, '\xaa'), std::string(50, '\xdd'),
       "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {counting, std::string(50, '\xcd'), "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
      {std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First",
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
      {std::string(131, '\xaa'),
       "This is a test using a larger than block-size key and a larger than block-size data. The key needs "
       "to "
       "be hashed before being used by the HMAC algorithm.",
       "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"}};
  for (const HmacVector& vector : vectors) {
    EXPECT_EQ(hex(hmac_sha256(bytes_of(vector.key), {bytes_of(vector.data)})), vector.digest);
    const std::string_view data = vector.data;
    EXPECT_EQ(hex(hmac_sha256(bytes_of(vector.key), {bytes_of(data.substr(0, 3)), bytes_of(data.substr(3))})),
              vector.digest);
  }
  // The fifth vector is of a digest cut to 128 bits.
  EXPECT_EQ(
      hex(hmac_sha256(bytes_of(std::string(20, '\x0c')), {bytes_of("Test With Truncation")})).substr(0, 32),
      "a3b6167473100ee06e0c796c2955552b");
}

TEST(EqualInConstantTime, EveryByteCounts) {
  const std::string text(33, 'x');
  EXPECT_TRUE(equal_in_constant_time(bytes_of(text), bytes_of(text)));
  EXPECT_TRUE(equal_in_constant_time({}, {}));
  EXPECT_FALSE(equal_in_constant_time(bytes_of(text), bytes_of(text.substr(1))));
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string other = text;
    other[i] ^= 1;
    EXPECT_FALSE(equal_in_constant_time(bytes_of(text), bytes_of(other)));
  }
}

}  // namespace
}  // namespace multiring
