// What an unauthenticated peer may send in a handshake, in either direction, and what may be in the store.

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

/// The secret of the corpus, whose messages are authenticated, and one that a fuzzer cannot guess.
struct Keys {
  tcp::HandshakeKey known = tcp::derive_handshake_key("corpus", "fuzz");
  tcp::HandshakeKey unknown = tcp::derive_handshake_key("not of the corpus", "fuzz");
  tcp::Nonce server = {};
  tcp::Nonce client = {};
  tcp::ConnectionInfo info = {1, 0, 2, 0, 0, 1, 1, 1};
};

void check_client_hello(const Keys& keys, std::span<const std::byte> input) {
  const bool begins = tcp::is_client_hello_prefix(input);
  const auto hello = tcp::parse_client_hello(keys.known, keys.server, input);
  MULTIRING_REQUIRE(!hello || begins);
  if (hello && hello->authenticated) {
    // It says exactly what the proof is about.
    const tcp::ClientHelloBytes again =
        tcp::encode_client_hello(keys.known, keys.server, hello->client_nonce, hello->info);
    MULTIRING_REQUIRE(std::equal(again.begin(), again.end(), input.begin(), input.end()));
  }
  const auto foreign = tcp::parse_client_hello(keys.unknown, keys.server, input);
  MULTIRING_REQUIRE(!foreign || (!foreign->authenticated && foreign->info == tcp::ConnectionInfo{}));
}

void check_server_hello(const Keys& keys, std::span<const std::byte> input) {
  const auto hello = tcp::parse_server_hello(keys.known, keys.server, keys.client, keys.info, input);
  if (hello && hello->authenticated) {
    const tcp::ServerHelloBytes again =
        tcp::encode_server_hello(keys.known, keys.server, keys.client, keys.info, hello->verdict);
    MULTIRING_REQUIRE(std::equal(again.begin(), again.end(), input.begin(), input.end()));
  }
  const auto foreign = tcp::parse_server_hello(keys.unknown, keys.server, keys.client, keys.info, input);
  MULTIRING_REQUIRE(!foreign || !foreign->authenticated);
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
  check_client_hello(keys, input);
  check_server_hello(keys, input);
  check_endpoint({reinterpret_cast<const char*>(data), size});
  return 0;
}
