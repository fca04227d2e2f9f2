#pragma once

#include <cstddef>

#include "base/arithmetic/dtype.h"
#include "base/arithmetic/order.h"
#include "base/export.h"
#include "base/nccl_scope.h"
#include "collective/plan/algorithm_row.h"
#include "topology/plan.h"

namespace multiring {

/// A collective whose arrays lie on devices, in a job.
struct DeviceRequest {
  Collective collective = Collective::kAllreduce;
  std::size_t bytes = 0;  ///< of the array of one rank
  DType dtype = DType::kFloat32;
  Order order = Order::kCanonical;  ///< of the job, and of the call
  NcclScope nccl = NcclScope::kHost;
  bool has_mode = false;    ///< MULTIRING_MODE is set
  bool is_rounded = false;  ///< by MULTIRING_COMM_DTYPE, between hosts
};

/// What runs a sum of arrays on devices of several hosts, a device for each rank, or what moves them, where
/// all ranks have NCCL:
///
///   nccl          by NCCL among all ranks
///   hierarchical  by NCCL within each host, and by the core across hosts
///   pinned        by what runs it for arrays on the host, to which they are copied
///
/// Without costs, which nothing has measured: as a row that is excluded, with the reason of the last one.
/// As jobs decide (NcclGroups::serves, DeviceOffers::offer); device_row_nccl_test.cpp compares.
MULTIRING_API AlgorithmRow device_row(const Cluster& cluster, const DeviceRequest& request);

}  // namespace multiring
