#include "collective/plan/device_row.h"

#include <cstdint>
#include <string>

#include "collective/descriptor.h"
#include "collective/device/device_offers.h"
#include "collective/plan/crossing_algorithm.h"
#include "device/nccl.h"

namespace multiring {
namespace {

bool is_too_small(std::size_t bytes) {
  Descriptor descriptor;
  descriptor.bytes = bytes;
  descriptor.offered_device = 0;
  return !waits_for_offers(descriptor);
}

/// Why the setting has NCCL not serve these ranks; empty: it has.
std::string why_not_among(const Cluster& cluster, const DeviceRequest& request) {
  const std::string setting = std::string("MULTIRING_NCCL=") + nccl_scope_name(request.nccl);
  switch (request.nccl) {
    case NcclScope::kOff:
      return setting;
    case NcclScope::kHost:
      return setting + " is for groups on one host";
    case NcclScope::kHierarchical:
      if (request.collective != Collective::kAllreduce) return setting + " is for allreduces";
      if (!cluster.regular() || cluster.hosts.front().ranks.size() < 2)
        return setting + " needs hosts with as many ranks each, at least two";
      return "";
    case NcclScope::kAll:
      return cluster.fully_linked() ? "" : "NCCL needs a link from each host to each";
  }
  return setting;
}

std::string why_not_by_nccl(const Cluster& cluster, const DeviceRequest& request) {
  const std::string name = collective_name(request.collective);
  if (std::string why = why_not_among(cluster, request); !why.empty()) return why;
  if (request.has_mode) return "NCCL is not asked in a job with a mode";
  if (request.collective == Collective::kScatter) return "NCCL is not asked for a " + name;
  if (is_too_small(request.bytes)) return "NCCL is not asked for so few bytes";
  if (request.order != Order::kAny) return "NCCL is asked in jobs for any order only (--order any)";
  if (request.is_rounded && request.collective == Collective::kAllreduce && request.nccl == NcclScope::kAll)
    return "NCCL does not round to MULTIRING_COMM_DTYPE";
  if (adds(request.collective) && !nccl::dtype_code(request.dtype))
    return std::string("NCCL adds no ") + dtype_name(request.dtype);
  return "";
}

}  // namespace

AlgorithmRow device_row(const Cluster& cluster, const DeviceRequest& request) {
  AlgorithmRow row;
  if (const std::string why = why_not_by_nccl(cluster, request); !why.empty()) {
    row.name = "pinned";
    row.excluded = "for arrays on GPUs, copied to the host and back: " + why;
  } else if (request.nccl == NcclScope::kHierarchical) {
    row.name = nccl_scope_name(request.nccl);
    row.excluded =
        "for arrays on GPUs, one for each rank, by NCCL within hosts and pinned memory across them: not "
        "predicted";
  } else {
    row.name = algorithm_name({CrossingAlgorithm::Kind::kNccl});
    row.excluded = "for arrays on GPUs, one for each rank, by NCCL among all ranks: not predicted";
  }
  return row;
}

}  // namespace multiring
