// What a stranger sends in a handshake, in either direction, and what somebody may have put in the store.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "require.h"
#include "transport/tcp/handshake/address.h"
#include "transport/tcp/handshake/handshake_messages.h"

namespace {

using namespace multiring;

/// The secret of the corpus, whose messages are proven, and one that a fuzzer cannot guess.
struct Keys {
  tcp::HandshakeKey known = tcp::derive_handshake_key("corpus", "fuzz");
  tcp::HandshakeKey unknown = tcp::derive_handshake_key("not of the corpus", "fuzz");
  tcp::Nonce listener = {};
  tcp::Nonce caller = {};
  tcp::HelloFacts facts = {1, 0, 2, 0, 0, 1, 1, 1};
};

void check_hello(const Keys& keys, std::span<const std::byte> input) {
  const bool begins = tcp::begins_like_hello(input);
  const auto hello = tcp::parse_hello(keys.known, keys.listener, input);
  MULTIRING_REQUIRE(!hello || begins);
  if (hello && hello->proven) {
    // It says exactly what the proof is about.
    const tcp::HelloBytes again =
        tcp::encode_hello(keys.known, keys.listener, hello->caller_nonce, hello->facts);
    MULTIRING_REQUIRE(std::equal(again.begin(), again.end(), input.begin(), input.end()));
  }
  const auto stranger = tcp::parse_hello(keys.unknown, keys.listener, input);
  MULTIRING_REQUIRE(!stranger || (!stranger->proven && stranger->facts == tcp::HelloFacts{}));
}

void check_welcome(const Keys& keys, std::span<const std::byte> input) {
  const auto welcome = tcp::parse_welcome(keys.known, keys.listener, keys.caller, keys.facts, input);
  if (welcome && welcome->proven) {
    const tcp::WelcomeBytes again =
        tcp::encode_welcome(keys.known, keys.listener, keys.caller, keys.facts, welcome->verdict);
    MULTIRING_REQUIRE(std::equal(again.begin(), again.end(), input.begin(), input.end()));
  }
  const auto stranger = tcp::parse_welcome(keys.unknown, keys.listener, keys.caller, keys.facts, input);
  MULTIRING_REQUIRE(!stranger || !stranger->proven);
}

void check_endpoint(std::string_view text) {
  const auto endpoint = tcp::parse_endpoint(text);
  if (!endpoint) return;
  MULTIRING_REQUIRE(!endpoint->addresses.empty());
  const auto again = tcp::parse_endpoint(tcp::format_endpoint(*endpoint));
  MULTIRING_REQUIRE(again && tcp::format_endpoint(*again) == tcp::format_endpoint(*endpoint));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Keys keys;
  const std::span<const std::byte> input = std::as_bytes(std::span(data, size));
  if (const auto nonce = tcp::parse_challenge(input)) {
    const tcp::ChallengeBytes again = tcp::encode_challenge(*nonce);
    MULTIRING_REQUIRE(std::equal(again.begin(), again.end(), input.begin(), input.end()));
  }
  check_hello(keys, input);
  check_welcome(keys, input);
  check_endpoint({reinterpret_cast<const char*>(data), size});
  return 0;
}
