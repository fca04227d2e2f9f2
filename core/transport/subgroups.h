#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/export.h"
#include "transport/waiting.h"

namespace multiring {

class Transport;

/// Memory that all ranks of a host have mapped: a part of `bytes_per_rank` for each rank.
class MULTIRING_API SymmetricRegion {
 public:
  virtual ~SymmetricRegion() = default;
  /// Null: `rank` is on another host.
  virtual std::byte* part(int rank) const = 0;
  virtual std::size_t bytes_per_rank() const = 0;
  /// The same on all ranks.
  virtual std::uint32_t id() const = 0;
};

/// What is made out of a group: memory in common, and transports among some of its ranks.
class MULTIRING_API Subgroups {
 public:
  /// Memory that all ranks of a host have mapped. Collective, with the same arguments on all ranks.
  virtual std::shared_ptr<SymmetricRegion> allocate(std::size_t bytes_per_rank, std::uint32_t id,
                                                    const WaitOptions& waiting) = 0;
  /// A transport among `members`: ranks of this one, including this rank, in their new order. Collective
  /// among the members; `tag` is the same on all members and never used twice. Raises WaitEnded, too.
  /// To be used once it has learned the addresses of all its ranks and `connect_subgroup` has returned.
  virtual std::shared_ptr<Transport> subgroup(std::span<const int> members, std::uint64_t tag,
                                              const WaitOptions& waiting) = 0;
  /// What other hosts need to reach this rank in this transport; empty: nothing.
  virtual std::string addresses() const { return {}; }
  /// Takes what `addresses` returned on each rank.
  virtual void learn_addresses(std::span<const std::string> /*by_rank*/) {}
  /// Connects a subgroup of this transport. Collective among its members. Raises WaitEnded, too.
  virtual void connect_subgroup(Transport& /*subgroup*/, const WaitOptions& /*waiting*/) {}

 protected:
  ~Subgroups() = default;
};

}  // namespace multiring
