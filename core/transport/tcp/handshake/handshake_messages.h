#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "base/export.h"
#include "base/sha256.h"

namespace multiring::tcp {

// How two ends of a new connection prove to each other that they belong to the same job, before either
// believes anything the other says:
//
//   listener -> caller    challenge  magic, nonce L
//   caller -> listener    hello      magic, facts, nonce C, HMAC(key, "caller", L, C, facts)
//   listener -> caller    welcome    magic, verdict, HMAC(key, "listener", L, C, facts, verdict)
//
// The key is derived from the job's secret and name; the facts say who calls whom and for what. So a proof is
// good for one connection, one direction, one pair of ranks and one channel: it can be neither replayed nor
// reflected. All three have fixed sizes: nobody reads more than these of a stranger. What follows is neither
// encrypted nor signed, so a network is to be used that is trusted with the training data as well.
//
// Functions here are pure, and take whatever a stranger may send.

using Nonce = std::array<std::byte, 32>;
using HandshakeKey = Sha256Digest;

/// What the caller says of a connection.
struct HelloFacts {
  std::int32_t caller = 0;    ///< rank
  std::int32_t listener = 0;  ///< rank
  std::int32_t size = 0;      ///< ranks of the job
  std::int32_t channel = 0;   ///< kControl: the control connection of the pair
  std::int32_t stripe = 0;    ///< which of the channel's connections
  std::int32_t stripes = 1;   ///< how many it has
  std::uint32_t weight = 1;   ///< the stripe's share among them
  std::uint64_t settings = 0;
  static constexpr std::int32_t kControl = -1;
  bool operator==(const HelloFacts&) const = default;
};

/// What the listener answers.
enum class Verdict : std::uint32_t {
  kWelcome = 1,
  kOtherSecret = 2,    ///< not proven, hence a hint at most
  kOtherSettings = 3,  ///< number of ranks, channels or version differ
  kWrongRank = 4,      ///< the listener is another rank than the one that was called
  kDuplicate = 5,      ///< it has this connection already: two processes say that they are the same rank
  kCrossed = 6,        ///< it is calling the caller, too, and is the higher rank: its call is taken
};

inline constexpr std::size_t kChallengeBytes = 8 + 32;
inline constexpr std::size_t kHelloBytes = 8 + 36 + 32 + 32;
inline constexpr std::size_t kWelcomeBytes = 8 + 4 + 32;
using ChallengeBytes = std::array<std::byte, kChallengeBytes>;
using HelloBytes = std::array<std::byte, kHelloBytes>;
using WelcomeBytes = std::array<std::byte, kWelcomeBytes>;

/// From the system's generator.
MULTIRING_API Nonce random_nonce();
MULTIRING_API HandshakeKey derive_handshake_key(std::string_view secret, std::string_view job);

MULTIRING_API ChallengeBytes encode_challenge(const Nonce& listener_nonce);
/// The nonce, if it is a challenge.
MULTIRING_API std::optional<Nonce> parse_challenge(std::span<const std::byte> bytes);

MULTIRING_API HelloBytes encode_hello(const HandshakeKey& key, const Nonce& listener_nonce,
                                      const Nonce& caller_nonce, const HelloFacts& facts);

struct Hello {
  /// False: whoever sent it follows the protocol, but does not know the key. Nothing else is then set.
  bool proven = false;
  HelloFacts facts = {};
  Nonce caller_nonce = {};
};
/// Whether the first bytes of what is to be a hello are those of one: a stranger need not be waited for.
MULTIRING_API bool begins_like_hello(std::span<const std::byte> bytes);
/// The hello, if it is one.
MULTIRING_API std::optional<Hello> parse_hello(const HandshakeKey& key, const Nonce& listener_nonce,
                                               std::span<const std::byte> bytes);

MULTIRING_API WelcomeBytes encode_welcome(const HandshakeKey& key, const Nonce& listener_nonce,
                                          const Nonce& caller_nonce, const HelloFacts& facts,
                                          Verdict verdict);
struct Welcome {
  bool proven = false;  ///< the listener knows the key
  Verdict verdict = Verdict::kOtherSecret;
};
/// The welcome to `facts`, if it is one.
MULTIRING_API std::optional<Welcome> parse_welcome(const HandshakeKey& key, const Nonce& listener_nonce,
                                                   const Nonce& caller_nonce, const HelloFacts& facts,
                                                   std::span<const std::byte> bytes);

}  // namespace multiring::tcp
