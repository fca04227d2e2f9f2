// Which of a host's interfaces are used.

#include <fnmatch.h>
#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <fstream>
#include <memory>

#include "base/error.h"
#include "transport/tcp/handshake/address.h"

namespace multiring::tcp {
namespace {

// Interfaces between a host and its own containers and virtual machines. Their addresses are the same on
// every host, so a peer that connected to one would reach itself.
constexpr const char* kInnerInterfaces[] = {"docker*", "br-*",     "veth*",  "virbr*",
                                            "cni*",    "flannel*", "podman*"};

bool matches(const std::string& pattern, const std::string& name) {
  return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

int prefix_of(const sockaddr* mask, bool ipv6) {
  if (mask == nullptr) return ipv6 ? 128 : 32;
  int bits = 0;
  if (ipv6) {
    for (const std::uint8_t byte : reinterpret_cast<const sockaddr_in6*>(mask)->sin6_addr.s6_addr)
      bits += std::popcount(byte);
  } else {
    bits = std::popcount(reinterpret_cast<const sockaddr_in*>(mask)->sin_addr.s_addr);
  }
  return bits;
}

std::uint32_t megabits_of(const std::string& interface) {
  std::ifstream file("/sys/class/net/" + interface + "/speed");
  long long megabits = 0;
  return file >> megabits && megabits > 0 && megabits < UINT32_MAX ? static_cast<std::uint32_t>(megabits) : 0;
}

std::string list(const std::vector<InterfaceAddress>& addresses) {
  std::string text;
  for (const InterfaceAddress& address : addresses)
    text += (text.empty() ? "" : ", ") + address.interface + " " + address.address.host_text();
  return text.empty() ? "none at all" : text;
}

}  // namespace

std::vector<InterfaceAddress> interface_addresses() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) throw_errno("getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, &::freeifaddrs);
  std::vector<InterfaceAddress> addresses;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    const auto address = SocketAddress::from(entry->ifa_addr);
    // Running: its cable is connected.
    if (!address || (entry->ifa_flags & IFF_UP) == 0 || (entry->ifa_flags & IFF_RUNNING) == 0) continue;
    // Several addresses of IPv4 may have labels: "eth0:1".
    const std::string label = entry->ifa_name;
    const std::string name = label.substr(0, label.find(':'));
    addresses.push_back(
        {name, *address, prefix_of(entry->ifa_netmask, address->is_ipv6()), megabits_of(name)});
  }
  return addresses;
}

InterfaceFilter::InterfaceFilter(std::span<const std::string> items) {
  for (const std::string& item : items) {
    text_ += (text_.empty() ? "" : ",") + item;
    const bool excluded = item.starts_with("^");
    (excluded ? excluded_ : chosen_).push_back(parse(excluded ? item.substr(1) : item, item));
  }
}

InterfaceFilter::Item InterfaceFilter::parse(const std::string& text, const std::string& whole) {
  Item item;
  const std::size_t slash = text.find('/');
  if (slash == std::string::npos && !text.empty()) {
    if (const auto address = SocketAddress::parse(text, 0))
      return {"", *address, address->is_ipv6() ? 128 : 32};
    item.name = text;
    return item;
  }
  if (slash != std::string::npos) {
    const auto network = SocketAddress::parse(text.substr(0, slash), 0);
    const char* end = text.data() + text.size();
    const auto [parsed, error] = std::from_chars(text.data() + slash + 1, end, item.prefix);
    if (network && error == std::errc() && parsed == end && item.prefix >= 0 &&
        item.prefix <= (network->is_ipv6() ? 128 : 32)) {
      item.network = *network;
      return item;
    }
  }
  throw Error(ErrorKind::kUsage, "interfaces: '" + whole +
                                     "' is not understood: give names (eth0, eth*) or networks (10.0.0.0/8), "
                                     "with ^ in front for what is not to be used");
}

bool InterfaceFilter::Item::applies(const InterfaceAddress& address) const {
  return name.empty() ? address.address.in_network(network, prefix) : matches(name, address.interface);
}

bool InterfaceFilter::chooses(const InterfaceAddress& address) const {
  // It is valid only together with the name of the interface, which differs between hosts.
  if (address.address.is_ipv6() && address.address.is_link_local()) return false;
  const auto applies = [&](const Item& item) { return item.applies(address); };
  if (std::any_of(excluded_.begin(), excluded_.end(), applies)) return false;
  if (!chosen_.empty()) return std::any_of(chosen_.begin(), chosen_.end(), applies);
  return !address.address.is_loopback() && !address.address.is_link_local() &&
         std::none_of(std::begin(kInnerInterfaces), std::end(kInnerInterfaces),
                      [&](const char* pattern) { return matches(pattern, address.interface); });
}

std::vector<InterfaceAddress> choose_addresses(const std::vector<InterfaceAddress>& all,
                                               std::span<const std::string> filter, bool local) {
  const std::vector<std::string> loopback = {"127.0.0.0/8", "::1"};
  const InterfaceFilter chosen(local && filter.empty() ? std::span<const std::string>(loopback) : filter);
  std::vector<InterfaceAddress> addresses;
  for (const InterfaceAddress& address : all)
    if (chosen.chooses(address)) addresses.push_back(address);
  if (addresses.empty())
    throw Error(ErrorKind::kUsage, "no interface of this host is left to reach other ranks by" +
                                       (chosen.text().empty() ? "" : " after interfaces=" + chosen.text()) +
                                       "; there are: " + list(all));
  return addresses;
}

}  // namespace multiring::tcp
