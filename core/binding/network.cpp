// Which addresses hosts would use for each other, for `multiring doctor`.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "binding/py_communicator.h"
#include "transport/tcp/handshake/address.h"

namespace py = pybind11;

namespace multiring::binding {
namespace {

/// Interface, address and the number of bits that name its network; may come from another host.
using PlainAddress = std::tuple<std::string, std::string, int>;

std::vector<PlainAddress> interface_addresses(const std::vector<std::string>& interfaces) {
  std::vector<PlainAddress> plain;
  for (const tcp::InterfaceAddress& found :
       tcp::choose_addresses(tcp::interface_addresses(), interfaces, /*local=*/false))
    plain.emplace_back(found.interface, found.address.host_text(), found.prefix);
  return plain;
}

std::vector<tcp::InterfaceAddress> parse(const std::vector<PlainAddress>& plain) {
  std::vector<tcp::InterfaceAddress> addresses;
  for (const auto& [interface, text, prefix] : plain) {
    const auto address = tcp::SocketAddress::parse(text, 0);
    if (!address) throw Error(ErrorKind::kUsage, "'" + text + "' is no address");
    addresses.push_back({interface, *address, prefix, 0});
  }
  return addresses;
}

std::vector<std::pair<std::size_t, std::size_t>> pair_addresses(const std::vector<PlainAddress>& caller,
                                                                const std::vector<PlainAddress>& listener) {
  std::vector<std::pair<std::size_t, std::size_t>> pairs;
  for (const tcp::AddressPair& pair : tcp::pair_addresses(parse(caller), parse(listener)))
    pairs.emplace_back(pair.client, pair.server);
  return pairs;
}

}  // namespace

void bind_network(py::module_& module) {
  module.def("interface_addresses", &interface_addresses, py::arg("interfaces"),
             "Interface, address and network bits of all that ranks on other hosts are reached by.");
  module.def("pair_addresses", &pair_addresses, py::arg("caller"), py::arg("listener"),
             "Which of the caller's addresses calls which of the listener's (indices).");
}

}  // namespace multiring::binding
