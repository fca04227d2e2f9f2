#pragma once

#include "base/export.h"
#include "collective/agreement/round_exchange.h"
#include "collective/device/device_offers.h"
#include "collective/device/nccl_groups.h"
#include "collective/device/peer_memory.h"
#include "collective/plan/plan_cache.h"

namespace multiring {

/// A rank's part in the collectives of a group: its rounds, and what it keeps from one collective to the
/// next.
class MULTIRING_API Exchange : public RoundExchange {
 public:
  using RoundExchange::RoundExchange;

  PlanCache& plans() { return plans_; }
  const PlanCache& plans() const { return plans_; }
  DeviceOffers& offers() { return offers_; }
  NcclGroups& nccl() { return nccl_; }
  const NcclGroups& nccl() const { return nccl_; }
  PeerMemory& peer_memory() { return peer_memory_; }

 private:
  PlanCache plans_;
  NcclGroups nccl_;
  PeerMemory peer_memory_;
  DeviceOffers offers_{nccl_, peer_memory_};
};

}  // namespace multiring
