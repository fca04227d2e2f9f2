#include "transport/tcp/handshake/address.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <set>

namespace multiring::tcp {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

template <class Number>
bool parse_number(std::string_view text, Number least, Number most, Number* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc() && end == text.data() + text.size() && *number >= least && *number <= most;
}

// "interface address prefix port megabits"
std::optional<InterfaceAddress> parse_interface_address(std::string_view line) {
  const auto words = split(line, ' ');
  std::uint16_t port = 0;
  InterfaceAddress parsed;
  if (words.size() != 5 || words[0].empty() || !parse_number<std::uint16_t>(words[3], 1, 65535, &port))
    return std::nullopt;
  const auto address = SocketAddress::parse(words[1], port);
  if (!address || !parse_number(words[2], 0, address->is_ipv6() ? 128 : 32, &parsed.prefix) ||
      !parse_number<std::uint32_t>(words[4], 0, UINT32_MAX, &parsed.megabits))
    return std::nullopt;
  parsed.interface = words[0];
  parsed.address = *address;
  return parsed;
}

}  // namespace

std::optional<SocketAddress> SocketAddress::parse(std::string_view text, std::uint16_t port) {
  const std::string copy(text);
  SocketAddress parsed;
  if (::inet_pton(AF_INET, copy.c_str(), &parsed.address_.ipv4.sin_addr) == 1) {
    parsed.address_.ipv4.sin_family = AF_INET;
  } else if (::inet_pton(AF_INET6, copy.c_str(), &parsed.address_.ipv6.sin6_addr) == 1) {
    parsed.address_.ipv6.sin6_family = AF_INET6;
  } else {
    return std::nullopt;
  }
  parsed.set_port(port);
  return parsed;
}

std::optional<SocketAddress> SocketAddress::from(const sockaddr* address) {
  SocketAddress copy;
  if (address == nullptr || (address->sa_family != AF_INET && address->sa_family != AF_INET6))
    return std::nullopt;
  std::memcpy(&copy.address_, address,
              address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
  return copy;
}

std::uint16_t SocketAddress::port() const {
  return ntohs(is_ipv6() ? address_.ipv6.sin6_port : address_.ipv4.sin_port);
}

void SocketAddress::set_port(std::uint16_t port) {
  (is_ipv6() ? address_.ipv6.sin6_port : address_.ipv4.sin_port) = htons(port);
}

std::span<const std::byte> SocketAddress::bits() const {
  if (is_ipv6()) return std::as_bytes(std::span(address_.ipv6.sin6_addr.s6_addr));
  return std::as_bytes(std::span(&address_.ipv4.sin_addr, 1));
}

bool SocketAddress::in_network(const SocketAddress& other, int prefix) const {
  if (family() != other.family()) return false;
  const auto mine = bits();
  const auto theirs = other.bits();
  for (int bit = 0; bit < prefix; ++bit) {
    const auto byte = static_cast<std::size_t>(bit / 8);
    const auto mask = static_cast<std::byte>(0x80 >> (bit % 8));
    if ((mine[byte] & mask) != (theirs[byte] & mask)) return false;
  }
  return true;
}

bool SocketAddress::is_loopback() const {
  return is_ipv6() ? IN6_IS_ADDR_LOOPBACK(&address_.ipv6.sin6_addr) != 0 : bits()[0] == std::byte{127};
}

bool SocketAddress::is_link_local() const {
  if (is_ipv6()) return IN6_IS_ADDR_LINKLOCAL(&address_.ipv6.sin6_addr) != 0;
  return bits()[0] == std::byte{169} && bits()[1] == std::byte{254};
}

std::string SocketAddress::host_text() const {
  std::array<char, INET6_ADDRSTRLEN> text{};
  ::inet_ntop(family(), bits().data(), text.data(), text.size());
  return text.data();
}

std::string SocketAddress::text() const {
  std::string text = is_ipv6() ? "[" : "";
  text.append(host_text()).append(is_ipv6() ? "]:" : ":").append(std::to_string(port()));
  return text;
}

std::string format_endpoint(const Endpoint& endpoint) {
  std::string text = endpoint.host + "\n" + std::to_string(endpoint.process_id);
  for (const InterfaceAddress& address : endpoint.addresses)
    text += "\n" + address.interface + " " + address.address.host_text() + " " +
            std::to_string(address.prefix) + " " + std::to_string(address.address.port()) + " " +
            std::to_string(address.megabits);
  return text;
}

std::optional<Endpoint> parse_endpoint(std::string_view text) {
  const auto lines = split(text, '\n');
  Endpoint endpoint;
  if (lines.size() < 3 || !parse_number<std::int64_t>(lines[1], 0, INT64_MAX, &endpoint.process_id))
    return std::nullopt;
  endpoint.host = lines[0];
  for (const std::string_view line : std::span(lines).subspan(2)) {
    auto address = parse_interface_address(line);
    if (!address) return std::nullopt;
    endpoint.addresses.push_back(std::move(*address));
  }
  return endpoint;
}

std::vector<AddressPair> pair_addresses(std::span<const InterfaceAddress> client,
                                        std::span<const InterfaceAddress> server) {
  std::vector<AddressPair> pairs;
  std::set<std::string> client_interfaces;
  std::set<std::string> server_interfaces;
  const auto pair_up = [&](bool ipv6, bool same_network) {
    for (std::size_t i = 0; i < client.size(); ++i) {
      for (std::size_t j = 0; j < server.size(); ++j) {
        const SocketAddress& mine = client[i].address;
        const SocketAddress& theirs = server[j].address;
        if (mine.is_ipv6() != ipv6 || theirs.is_ipv6() != ipv6) continue;
        if (same_network && !mine.in_network(theirs, std::max(client[i].prefix, server[j].prefix))) continue;
        if (client_interfaces.contains(client[i].interface) ||
            server_interfaces.contains(server[j].interface))
          continue;
        client_interfaces.insert(client[i].interface);
        server_interfaces.insert(server[j].interface);
        pairs.push_back({i, j});
      }
    }
  };
  for (const bool ipv6 : {false, true}) pair_up(ipv6, true);
  if (pairs.empty())
    for (const bool ipv6 : {false, true}) pair_up(ipv6, false);
  return pairs;
}

}  // namespace multiring::tcp
