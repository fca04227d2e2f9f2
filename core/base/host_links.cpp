#include "base/host_links.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "base/names.h"

namespace multiring {

const char* host_links_name(HostLinks links) {
  static constexpr const char* kNames[] = {"switch", "ring", "line"};
  return name_in(kNames, links, "unknown");
}

HostLinks parse_host_links(std::string_view name) {
  for (int value = 0; value < kHostLinksCount; ++value)
    if (const auto links = static_cast<HostLinks>(value); name == host_links_name(links)) return links;
  throw_usage("host_links is '" + std::string(name) + "'; accepted: switch, ring, line");
}

bool have_link(HostLinks links, int hosts, int one, int other) {
  if (links == HostLinks::kSwitch) return true;
  const int distance = std::abs(one - other);
  return distance <= 1 || (links == HostLinks::kRing && distance == hosts - 1);
}

}  // namespace multiring
