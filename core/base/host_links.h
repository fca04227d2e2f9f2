#pragma once

#include <cstdint>
#include <string_view>

#include "base/export.h"

namespace multiring {

/// Which hosts have a link to which, by their numbers.
enum class HostLinks : std::uint8_t {
  kSwitch = 0,  ///< each to each
  kRing = 1,    ///< each to the one before it and the one after it, the last to the first
  kLine = 2,    ///< the same, but not the last to the first
};
inline constexpr int kHostLinksCount = 3;

/// "switch", "ring", "line".
MULTIRING_API const char* host_links_name(HostLinks links);
/// The ones with this name. Raises a usage error that says what is accepted.
MULTIRING_API HostLinks parse_host_links(std::string_view name);

/// Whether hosts `one` and `other` of `hosts` have a link, or are the same.
MULTIRING_API bool have_link(HostLinks links, int hosts, int one, int other);

}  // namespace multiring
