#pragma once

#include <netinet/in.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/export.h"

namespace multiring::tcp {

/// An address of IPv4 or IPv6, and a port.
class MULTIRING_API SocketAddress {
 public:
  /// "10.0.0.1" or "fd00::1"; no names.
  static std::optional<SocketAddress> parse(std::string_view text, std::uint16_t port);
  /// As the kernel gives it; none for other families.
  static std::optional<SocketAddress> from(const sockaddr* address);

  bool is_ipv6() const { return address_.any.sa_family == AF_INET6; }
  bool is_loopback() const;
  /// Unique only on one network (fe80::/10, 169.254.0.0/16).
  bool is_link_local() const;
  std::uint16_t port() const;
  void set_port(std::uint16_t port);
  /// Whether the first `prefix` bits are those of `other`; false for another family.
  bool in_network(const SocketAddress& other, int prefix) const;

  /// "10.0.0.1" and "10.0.0.1:4711", "[fd00::1]:4711".
  std::string host_text() const;
  std::string text() const;

  int family() const { return address_.any.sa_family; }
  const sockaddr* data() const { return &address_.any; }
  socklen_t length() const { return is_ipv6() ? sizeof(sockaddr_in6) : sizeof(sockaddr_in); }

 private:
  std::span<const std::byte> bits() const;

  union {
    sockaddr_in6 ipv6;
    sockaddr_in ipv4;
    sockaddr any;
  } address_ = {};
};

/// An address of a host, and the interface that has it.
struct InterfaceAddress {
  std::string interface;
  SocketAddress address;
  int prefix = 0;              ///< bits that name the network
  std::uint32_t megabits = 0;  ///< per second; 0: unknown
};

/// The interfaces to use, as users write them: names ("eth0", "eth*"), networks ("10.0.0.0/8"), and either of
/// them with "^" in front to exclude it. An address is chosen if any item includes it and none excludes it.
/// Without an including item, all are included except loopback, interfaces of containers and virtual
/// machines, and link-local addresses. Link-local addresses of IPv6 are never chosen.
class MULTIRING_API InterfaceFilter {
 public:
  /// Raises a usage error for an item that is not understood.
  explicit InterfaceFilter(std::span<const std::string> items);
  bool chooses(const InterfaceAddress& address) const;
  const std::string& text() const { return text_; }

 private:
  struct Item {
    std::string name;  // empty: a network
    SocketAddress network;
    int prefix = 0;
    bool applies(const InterfaceAddress& address) const;
  };
  static Item parse(const std::string& text, const std::string& whole);

  std::vector<Item> chosen_;
  std::vector<Item> excluded_;
  std::string text_;
};

/// The addresses of the interfaces that are up and connected.
MULTIRING_API std::vector<InterfaceAddress> interface_addresses();
/// Those that a rank listens on and connects from. `local`: all ranks are on this host, so only loopback is
/// used unless the filter says otherwise. Raises a usage error that lists all addresses if none is chosen.
MULTIRING_API std::vector<InterfaceAddress> choose_addresses(const std::vector<InterfaceAddress>& all,
                                                             std::span<const std::string> filter, bool local);

/// A rank's entry in the store: its process and the addresses that it listens on.
struct Endpoint {
  std::string host;
  std::int64_t process_id = 0;
  std::vector<InterfaceAddress> addresses;
};
MULTIRING_API std::string format_endpoint(const Endpoint& endpoint);
MULTIRING_API std::optional<Endpoint> parse_endpoint(std::string_view text);

/// Indices of the client's address and of the server's address of a connection.
struct AddressPair {
  std::size_t client = 0;
  std::size_t server = 0;
  bool operator==(const AddressPair&) const = default;
};
/// Pairs the interfaces of two hosts, each used at most once: those in the same network; if no two are, in
/// the order of the lists, assuming routers between them. An interface with addresses of both families is
/// used with one of them, preferably IPv4.
MULTIRING_API std::vector<AddressPair> pair_addresses(std::span<const InterfaceAddress> client,
                                                      std::span<const InterfaceAddress> server);

}  // namespace multiring::tcp
