#pragma once

#include <cstdint>
#include <string_view>

#include "base/export.h"

namespace multiring {

/// Among which ranks arrays on devices may pass by NCCL.
enum class NcclScope : std::uint8_t {
  kOff,           ///< none
  kHost,          ///< those of a group that is on one host
  kHierarchical,  ///< and those of each host, in allreduces of a group on several; the core adds across hosts
  kAll,           ///< all, on however many hosts
};
inline constexpr int kNcclScopeCount = 4;

/// "off", "host", "hierarchical", "all".
MULTIRING_API const char* nccl_scope_name(NcclScope scope);
/// The one with this name. Raises a usage error that says what is accepted.
MULTIRING_API NcclScope parse_nccl_scope(std::string_view name);

}  // namespace multiring
