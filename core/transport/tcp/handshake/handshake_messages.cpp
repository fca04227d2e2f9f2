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
constexpr std::uint64_t kChallengeMagic = 0x01'4c'48'43'50'43'52'4d;    // "MRCPCHL" 1
constexpr std::uint64_t kClientHelloMagic = 0x01'4f'4c'48'50'43'52'4d;  // "MRCPHLO" 1
constexpr std::uint64_t kServerHelloMagic = 0x01'4d'4c'57'50'43'52'4d;  // "MRCPWLM" 1
constexpr std::size_t kInfoBytes = 36;
using InfoBytes = std::array<std::byte, kInfoBytes>;

InfoBytes encode_info(const ConnectionInfo& info) {
  InfoBytes bytes;
  FieldWriter writer(bytes);
  writer.put(info.client);
  writer.put(info.server);
  writer.put(info.size);
  writer.put(info.channel);
  writer.put(info.stripe);
  writer.put(info.stripes);
  writer.put(info.weight);
  writer.put(info.settings);
  return bytes;
}

ConnectionInfo parse_info(std::span<const std::byte> bytes) {
  FieldReader reader(bytes);
  ConnectionInfo info;
  info.client = reader.get<std::int32_t>();
  info.server = reader.get<std::int32_t>();
  info.size = reader.get<std::int32_t>();
  info.channel = reader.get<std::int32_t>();
  info.stripe = reader.get<std::int32_t>();
  info.stripes = reader.get<std::int32_t>();
  info.weight = reader.get<std::uint32_t>();
  info.settings = reader.get<std::uint64_t>();
  return info;
}

Sha256Digest client_proof(const HandshakeKey& key, const Nonce& server_nonce, const Nonce& client_nonce,
                          std::span<const std::byte> info) {
  return hmac_sha256(key, {bytes_of("caller"), server_nonce, client_nonce, info});
}

Sha256Digest server_proof(const HandshakeKey& key, const Nonce& server_nonce, const Nonce& client_nonce,
                          const ConnectionInfo& info, std::span<const std::byte> verdict) {
  return hmac_sha256(key, {bytes_of("listener"), server_nonce, client_nonce, encode_info(info), verdict});
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

ChallengeBytes encode_challenge(const Nonce& server_nonce) {
  ChallengeBytes bytes;
  FieldWriter writer(bytes);
  writer.put(kChallengeMagic);
  writer.put(std::span<const std::byte>(server_nonce));
  return bytes;
}

std::optional<Nonce> parse_challenge(std::span<const std::byte> bytes) {
  if (bytes.size() != kChallengeBytes || !begins_with(bytes, kChallengeMagic)) return std::nullopt;
  Nonce nonce;
  FieldReader(bytes.subspan(8)).get(nonce);
  return nonce;
}

ClientHelloBytes encode_client_hello(const HandshakeKey& key, const Nonce& server_nonce,
                                     const Nonce& client_nonce, const ConnectionInfo& info) {
  ClientHelloBytes bytes;
  const InfoBytes encoded = encode_info(info);
  FieldWriter writer(bytes);
  writer.put(kClientHelloMagic);
  writer.put(std::span<const std::byte>(encoded));
  writer.put(std::span<const std::byte>(client_nonce));
  writer.put(std::span<const std::byte>(client_proof(key, server_nonce, client_nonce, encoded)));
  return bytes;
}

bool is_client_hello_prefix(std::span<const std::byte> bytes) {
  std::array<std::byte, 8> magic;
  FieldWriter(magic).put(kClientHelloMagic);
  const std::size_t compared = std::min(bytes.size(), magic.size());
  return std::equal(magic.begin(), magic.begin() + static_cast<std::ptrdiff_t>(compared), bytes.begin());
}

std::optional<ClientHello> parse_client_hello(const HandshakeKey& key, const Nonce& server_nonce,
                                              std::span<const std::byte> bytes) {
  if (bytes.size() != kClientHelloBytes || !begins_with(bytes, kClientHelloMagic)) return std::nullopt;
  const std::span<const std::byte> info = bytes.subspan(8, kInfoBytes);
  Nonce client_nonce;
  FieldReader(bytes.subspan(8 + kInfoBytes)).get(client_nonce);
  // The proof comes first: nothing else from an unauthenticated peer is parsed.
  if (!equal_in_constant_time(client_proof(key, server_nonce, client_nonce, info), bytes.last(32)))
    return ClientHello{};
  return ClientHello{true, parse_info(info), client_nonce};
}

ServerHelloBytes encode_server_hello(const HandshakeKey& key, const Nonce& server_nonce,
                                     const Nonce& client_nonce, const ConnectionInfo& info, Verdict verdict) {
  ServerHelloBytes bytes;
  FieldWriter writer(bytes);
  writer.put(kServerHelloMagic);
  writer.put(static_cast<std::uint32_t>(verdict));
  const std::span<const std::byte> verdict_bytes = std::span(bytes).subspan(8, 4);
  writer.put(std::span<const std::byte>(server_proof(key, server_nonce, client_nonce, info, verdict_bytes)));
  return bytes;
}

std::optional<ServerHello> parse_server_hello(const HandshakeKey& key, const Nonce& server_nonce,
                                              const Nonce& client_nonce, const ConnectionInfo& info,
                                              std::span<const std::byte> bytes) {
  if (bytes.size() != kServerHelloBytes || !begins_with(bytes, kServerHelloMagic)) return std::nullopt;
  const std::span<const std::byte> verdict_bytes = bytes.subspan(8, 4);
  const auto verdict = FieldReader(verdict_bytes).get<std::uint32_t>();
  if (verdict < static_cast<std::uint32_t>(Verdict::kAccepted) ||
      verdict > static_cast<std::uint32_t>(Verdict::kSimultaneous))
    return std::nullopt;
  const Sha256Digest proof = server_proof(key, server_nonce, client_nonce, info, verdict_bytes);
  return ServerHello{equal_in_constant_time(proof, bytes.last(32)), static_cast<Verdict>(verdict)};
}

}  // namespace multiring::tcp
