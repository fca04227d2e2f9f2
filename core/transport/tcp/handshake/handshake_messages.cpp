#include "transport/tcp/handshake/handshake_messages.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "base/text.h"
#include "transport/tcp/byte_order.h"

namespace multiring::tcp {
namespace {

// The last byte counts versions of the protocol.
constexpr std::uint64_t kChallengeMagic = 0x01'4c'48'43'50'43'52'4d;  // "MRCPCHL" 1
constexpr std::uint64_t kHelloMagic = 0x01'4f'4c'48'50'43'52'4d;      // "MRCPHLO" 1
constexpr std::uint64_t kWelcomeMagic = 0x01'4d'4c'57'50'43'52'4d;    // "MRCPWLM" 1
constexpr std::size_t kFactsBytes = 36;
using FactsBytes = std::array<std::byte, kFactsBytes>;

FactsBytes encode_facts(const HelloFacts& facts) {
  FactsBytes bytes;
  FieldWriter writer(bytes);
  writer.put(facts.caller);
  writer.put(facts.listener);
  writer.put(facts.size);
  writer.put(facts.channel);
  writer.put(facts.stripe);
  writer.put(facts.stripes);
  writer.put(facts.weight);
  writer.put(facts.settings);
  return bytes;
}

HelloFacts parse_facts(std::span<const std::byte> bytes) {
  FieldReader reader(bytes);
  HelloFacts facts;
  facts.caller = reader.get<std::int32_t>();
  facts.listener = reader.get<std::int32_t>();
  facts.size = reader.get<std::int32_t>();
  facts.channel = reader.get<std::int32_t>();
  facts.stripe = reader.get<std::int32_t>();
  facts.stripes = reader.get<std::int32_t>();
  facts.weight = reader.get<std::uint32_t>();
  facts.settings = reader.get<std::uint64_t>();
  return facts;
}

Sha256Digest caller_proof(const HandshakeKey& key, const Nonce& listener_nonce, const Nonce& caller_nonce,
                          std::span<const std::byte> facts) {
  return hmac_sha256(key, {bytes_of("caller"), listener_nonce, caller_nonce, facts});
}

Sha256Digest listener_proof(const HandshakeKey& key, const Nonce& listener_nonce, const Nonce& caller_nonce,
                            const HelloFacts& facts, std::span<const std::byte> verdict) {
  return hmac_sha256(key, {bytes_of("listener"), listener_nonce, caller_nonce, encode_facts(facts), verdict});
}

bool begins_with(std::span<const std::byte> bytes, std::uint64_t magic) {
  return FieldReader(bytes).get<std::uint64_t>() == magic;
}

}  // namespace

Nonce random_nonce() {
  Nonce nonce;
  std::size_t filled = 0;
  while (filled < nonce.size()) {
    const ssize_t got = ::getrandom(nonce.data() + filled, nonce.size() - filled, 0);
    if (got < 0 && errno != EINTR) throw_errno("getrandom");
    if (got > 0) filled += static_cast<std::size_t>(got);
  }
  return nonce;
}

HandshakeKey derive_handshake_key(std::string_view secret, std::string_view job) {
  return hmac_sha256(bytes_of(secret), {bytes_of("multiring tcp "), bytes_of(job)});
}

ChallengeBytes encode_challenge(const Nonce& listener_nonce) {
  ChallengeBytes bytes;
  FieldWriter writer(bytes);
  writer.put(kChallengeMagic);
  writer.put(std::span<const std::byte>(listener_nonce));
  return bytes;
}

std::optional<Nonce> parse_challenge(std::span<const std::byte> bytes) {
  if (bytes.size() != kChallengeBytes || !begins_with(bytes, kChallengeMagic)) return std::nullopt;
  Nonce nonce;
  FieldReader(bytes.subspan(8)).get(nonce);
  return nonce;
}

HelloBytes encode_hello(const HandshakeKey& key, const Nonce& listener_nonce, const Nonce& caller_nonce,
                        const HelloFacts& facts) {
  HelloBytes bytes;
  const FactsBytes encoded = encode_facts(facts);
  FieldWriter writer(bytes);
  writer.put(kHelloMagic);
  writer.put(std::span<const std::byte>(encoded));
  writer.put(std::span<const std::byte>(caller_nonce));
  writer.put(std::span<const std::byte>(caller_proof(key, listener_nonce, caller_nonce, encoded)));
  return bytes;
}

bool begins_like_hello(std::span<const std::byte> bytes) {
  std::array<std::byte, 8> magic;
  FieldWriter(magic).put(kHelloMagic);
  const std::size_t compared = std::min(bytes.size(), magic.size());
  return std::equal(magic.begin(), magic.begin() + static_cast<std::ptrdiff_t>(compared), bytes.begin());
}

std::optional<Hello> parse_hello(const HandshakeKey& key, const Nonce& listener_nonce,
                                 std::span<const std::byte> bytes) {
  if (bytes.size() != kHelloBytes || !begins_with(bytes, kHelloMagic)) return std::nullopt;
  const std::span<const std::byte> facts = bytes.subspan(8, kFactsBytes);
  Nonce caller_nonce;
  FieldReader(bytes.subspan(8 + kFactsBytes)).get(caller_nonce);
  // The proof is looked at first: what a stranger says of itself is not even read.
  if (!equal_in_constant_time(caller_proof(key, listener_nonce, caller_nonce, facts), bytes.last(32)))
    return Hello{};
  return Hello{true, parse_facts(facts), caller_nonce};
}

WelcomeBytes encode_welcome(const HandshakeKey& key, const Nonce& listener_nonce, const Nonce& caller_nonce,
                            const HelloFacts& facts, Verdict verdict) {
  WelcomeBytes bytes;
  FieldWriter writer(bytes);
  writer.put(kWelcomeMagic);
  writer.put(static_cast<std::uint32_t>(verdict));
  const std::span<const std::byte> said = std::span(bytes).subspan(8, 4);
  writer.put(std::span<const std::byte>(listener_proof(key, listener_nonce, caller_nonce, facts, said)));
  return bytes;
}

std::optional<Welcome> parse_welcome(const HandshakeKey& key, const Nonce& listener_nonce,
                                     const Nonce& caller_nonce, const HelloFacts& facts,
                                     std::span<const std::byte> bytes) {
  if (bytes.size() != kWelcomeBytes || !begins_with(bytes, kWelcomeMagic)) return std::nullopt;
  const std::span<const std::byte> said = bytes.subspan(8, 4);
  const auto verdict = FieldReader(said).get<std::uint32_t>();
  if (verdict < static_cast<std::uint32_t>(Verdict::kWelcome) ||
      verdict > static_cast<std::uint32_t>(Verdict::kCrossed))
    return std::nullopt;
  const Sha256Digest proof = listener_proof(key, listener_nonce, caller_nonce, facts, said);
  return Welcome{equal_in_constant_time(proof, bytes.last(32)), static_cast<Verdict>(verdict)};
}

}  // namespace multiring::tcp
