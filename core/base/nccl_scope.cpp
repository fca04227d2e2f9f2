#include "base/nccl_scope.h"

#include <string>

#include "base/error.h"
#include "base/names.h"

namespace multiring {

const char* nccl_scope_name(NcclScope scope) {
  static constexpr const char* kNames[] = {"off", "host", "hierarchical", "all"};
  return name_in(kNames, scope, "unknown");
}

NcclScope parse_nccl_scope(std::string_view name) {
  for (int value = 0; value < kNcclScopeCount; ++value)
    if (const auto scope = static_cast<NcclScope>(value); name == nccl_scope_name(scope)) return scope;
  throw_usage("nccl is '" + std::string(name) + "'; accepted: off, host, hierarchical, all");
}

}  // namespace multiring
