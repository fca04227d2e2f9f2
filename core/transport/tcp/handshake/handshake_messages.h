#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "base/export.h"
#include "base/hash/sha256.h"

namespace multiring::tcp {

// The handshake of a new connection. Both ends prove that they belong to the same job before either believes
// anything that the other says:
//
//   server -> client    challenge       magic, nonce S
//   client -> server    client hello    magic, info, nonce C, HMAC(key, "caller", S, C, info)
//   server -> client    server hello    magic, verdict, HMAC(key, "listener", S, C, info, verdict)
//
// The key is derived from the job's secret and name, and the info names the ranks and the channel. So a proof
// is valid for one connection, one direction, one pair of ranks and one channel; it can be neither replayed
// nor reflected. All three have fixed sizes, and no more is read from an unauthenticated peer. What follows
// is neither encrypted nor signed: use a network that is trusted with the training data as well.
//
// Functions here are pure, and accept whatever bytes a peer may send.

using Nonce = std::array<std::byte, 32>;
using HandshakeKey = Sha256Digest;

/// What the client says about a connection.
struct ConnectionInfo {
  std::int32_t client = 0;   ///< rank
  std::int32_t server = 0;   ///< rank
  std::int32_t size = 0;     ///< ranks of the job
  std::int32_t channel = 0;  ///< kControl: the control connection of the pair
  std::int32_t stripe = 0;   ///< index among the channel's connections
  std::int32_t stripes = 1;  ///< number of the channel's connections
  std::uint32_t weight = 1;  ///< the stripe's share among them
  std::uint64_t settings = 0;
  static constexpr std::int32_t kControl = -1;
  bool operator==(const ConnectionInfo&) const = default;
};

/// What the server answers.
enum class Verdict : std::uint32_t {
  kAccepted = 1,
  kOtherSecret = 2,    ///< a hint only, since it carries no proof
  kOtherSettings = 3,  ///< number of ranks, channels or version differ
  kWrongRank = 4,      ///< the server is not the rank that the client wants
  kDuplicate = 5,      ///< the connection exists already: two processes claim the same rank
  kSimultaneous = 6,   ///< both are connecting, and the server is the higher rank: its connection is taken
};

inline constexpr std::size_t kChallengeBytes = 8 + 32;
inline constexpr std::size_t kClientHelloBytes = 8 + 36 + 32 + 32;
inline constexpr std::size_t kServerHelloBytes = 8 + 4 + 32;
using ChallengeBytes = std::array<std::byte, kChallengeBytes>;
using ClientHelloBytes = std::array<std::byte, kClientHelloBytes>;
using ServerHelloBytes = std::array<std::byte, kServerHelloBytes>;

/// From the system's generator.
MULTIRING_API Nonce random_nonce();
MULTIRING_API HandshakeKey derive_handshake_key(std::string_view secret, std::string_view job);

MULTIRING_API ChallengeBytes encode_challenge(const Nonce& server_nonce);
/// None: it is not a challenge.
MULTIRING_API std::optional<Nonce> parse_challenge(std::span<const std::byte> bytes);

MULTIRING_API ClientHelloBytes encode_client_hello(const HandshakeKey& key, const Nonce& server_nonce,
                                                   const Nonce& client_nonce, const ConnectionInfo& info);

struct ClientHello {
  /// False: the sender does not know the key, and nothing else is set.
  bool authenticated = false;
  ConnectionInfo info = {};
  Nonce client_nonce = {};
};
/// Whether `bytes` can be the beginning of a client hello: otherwise the rest need not be waited for.
MULTIRING_API bool is_client_hello_prefix(std::span<const std::byte> bytes);
/// None: it is not a client hello.
MULTIRING_API std::optional<ClientHello> parse_client_hello(const HandshakeKey& key,
                                                            const Nonce& server_nonce,
                                                            std::span<const std::byte> bytes);

MULTIRING_API ServerHelloBytes encode_server_hello(const HandshakeKey& key, const Nonce& server_nonce,
                                                   const Nonce& client_nonce, const ConnectionInfo& info,
                                                   Verdict verdict);
struct ServerHello {
  bool authenticated = false;  ///< the server knows the key
  Verdict verdict = Verdict::kOtherSecret;
};
/// None: it is not a server hello.
MULTIRING_API std::optional<ServerHello> parse_server_hello(const HandshakeKey& key,
                                                            const Nonce& server_nonce,
                                                            const Nonce& client_nonce,
                                                            const ConnectionInfo& info,
                                                            std::span<const std::byte> bytes);

}  // namespace multiring::tcp
