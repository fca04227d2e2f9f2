#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

#include "base/immovable.h"
#include "collective/agreement/round_exchange.h"
#include "collective/operation.h"

namespace multiring {

class NcclGroups;
class PeerMemory;

/// Whether a rank that asks for this has nothing on the host to begin with before the offers of all are
/// known.
bool waits_for_offers(const Descriptor& descriptor);
/// Whether there is such a rank in the current round.
bool any_offers(const RoundExchange& exchange);

/// How the ranks of a group agree on which operations run where their arrays lie, by NCCL or in peer memory:
/// each offers what it can do, and decides from what all have published.
class DeviceOffers : Immovable {
 public:
  DeviceOffers(NcclGroups& nccl, PeerMemory& peer_memory) : nccl_(nccl), peer_memory_(peer_memory) {}

  /// What of that the job wants.
  struct Wanted {
    Order order;            ///< of additions, where calls do not name one
    bool peer_memory;       ///< MULTIRING_PEER_MEMORY
    std::size_t min_bytes;  ///< of arrays that allreduces never fuse: what is fused depends on time
  };

  /// In the thread that issues an operation with arrays on devices: whether this rank offers to run it where
  /// they lie, as its descriptor tells the others. If the last offer of this name and size came to nothing
  /// the arrays are copied to the host all the same, so that nothing waits if this one does too; where all
  /// ranks had offered, and NCCL has not served them, this one is of peer memory. Thread-safe.
  void offer(Operation& operation, const RoundExchange& exchange, const Wanted& wanted) const;

  /// RoundExchange::match, for a collective that NCCL or peer memory may run, as its descriptor says then:
  /// whether all ranks are to run it so. Else `stage()` has let the others read what the operation's input is
  /// by then; it may be called twice. `check()` raises what else does not match, before anything is asked
  /// for.
  template <class Stage, class Check>
  bool match(RoundExchange& exchange, const OperationCall& call, Operation& operation, const Stage& stage,
             const Check& check) {
    exchange.match(call, operation.descriptor, [&] {
      if (!waits_for_offers(operation.descriptor)) stage();
    });
    check();
    if (!any_offers(exchange)) return false;
    if (agree(exchange, call, operation)) return true;
    exchange.next(call, stage);
    return false;
  }

  /// When some ranks have offered, in the round in which they are matched: whether all are to run the
  /// operation so, whose arrays are then those on the device. Else, on all ranks, they lie in host memory, to
  /// which those of this rank are copied now if they have not been before.
  bool agree(RoundExchange& exchange, const OperationCall& call, Operation& operation);

 private:
  bool is_noted(const std::set<std::uint64_t>& keys, std::uint64_t key) const;
  void note_offer(const Operation& operation, bool is_taken, bool by_all);

  NcclGroups& nccl_;
  PeerMemory& peer_memory_;
  mutable std::mutex mutex_;
  std::set<std::uint64_t> not_taken_;    // arrays, by key_of()
  std::set<std::uint64_t> not_by_nccl_;  // what all ranks have offered to NCCL, without a result
};

/// Staging memory that what ranks publish of their devices has to fit.
inline constexpr std::size_t kOfferBytes = 512;

/// What each rank publishes, by rank, in a round of its own.
template <class Value>
std::vector<Value> exchanged(RoundExchange& exchange, const OperationCall& call, const Value& mine) {
  static_assert(sizeof(Value) <= kOfferBytes);
  exchange.next(call, [&] {
    std::memcpy(exchange.staging(exchange.rank()), &mine, sizeof mine);
    exchange.staged(sizeof mine);
  });
  std::vector<Value> all(static_cast<std::size_t>(exchange.size()));
  for (int rank = 0; rank < exchange.size(); ++rank)
    std::memcpy(static_cast<void*>(&all[static_cast<std::size_t>(rank)]), exchange.staging(rank),
                sizeof(Value));
  return all;
}

}  // namespace multiring
