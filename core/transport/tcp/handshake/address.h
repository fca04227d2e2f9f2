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
  /// "10.0.0.1" or "fd00::1"; nothing else, no names.
  static std::optional<SocketAddress> parse(std::string_view text, std::uint16_t port);
  /// As the kernel gives it; none for other families.
  static std::optional<SocketAddress> from(const sockaddr* address);

  bool is_ipv6() const { return address_.any.sa_family == AF_INET6; }
  bool is_loopback() const;
  /// Means one host only together with an interface (fe80::/10, 169.254.0.0/16).
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

/// An address of this host that peers may be reached by.
struct InterfaceAddress {
  std::string interface;
  SocketAddress address;
  int prefix = 0;              ///< bits that name the network
  std::uint32_t megabits = 0;  ///< per second; 0: unknown
};

/// What is chosen of a host's interfaces, as users write it: names ("eth0", "eth*"), networks ("10.0.0.0/8"),
/// and either with "^" in front for what is not to be used. Any of these is enough to be chosen, none of
/// those may apply. Without a positive item everything is chosen but loopback, interfaces of containers and
/// virtual machines, and link-local addresses; those of IPv6 are never chosen.
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
/// Those that a rank listens on and calls from. `local`: all ranks are on this host, so that loopback is
/// enough, and is all that is used unless the filter chooses something else. Raises a usage error that lists
/// what is there if nothing is left.
MULTIRING_API std::vector<InterfaceAddress> choose_addresses(const std::vector<InterfaceAddress>& all,
                                                             std::span<const std::string> filter, bool local);

/// A rank's entry in the store: who it is and where it listens.
struct Endpoint {
  std::string host;
  std::int64_t process_id = 0;
  std::vector<InterfaceAddress> addresses;
};
MULTIRING_API std::string format_endpoint(const Endpoint& endpoint);
MULTIRING_API std::optional<Endpoint> parse_endpoint(std::string_view text);

/// Which of the caller's addresses calls which of the listener's (indices).
struct AddressPair {
  std::size_t caller = 0;
  std::size_t listener = 0;
  bool operator==(const AddressPair&) const = default;
};
/// Pairs the interfaces of two hosts, each used at most once: those in the same network first; where no two
/// share one, in the order in which they are listed, for there are routers between. An interface with
/// addresses of both families is used with one of them, IPv4 if it has the choice.
MULTIRING_API std::vector<AddressPair> pair_addresses(std::span<const InterfaceAddress> caller,
                                                      std::span<const InterfaceAddress> listener);

}  // namespace multiring::tcp
