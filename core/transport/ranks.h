#pragma once

#include <cstdint>
#include <string>

#include "base/export.h"

namespace multiring {

/// The ranks of a group, and where they are.
class MULTIRING_API Ranks {
 public:
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Name of the host of `rank` and its process id, for messages.
  virtual std::string host(int rank) const = 0;
  virtual std::int64_t process_id(int rank) const = 0;
  /// The world rank of `rank`, by which users know it.
  virtual int world_rank(int rank) const = 0;
  /// Equal for ranks that share memory with each other.
  virtual int host_number(int rank) const = 0;

  /// Whether messages may go straight from the host of `rank` to that of `other`.
  virtual bool has_link(int /*rank*/, int /*other*/) const { return true; }
  /// Whether that is so for all ranks. The same on all ranks.
  virtual bool fully_linked() const { return true; }

  /// Whether ranks outnumber their cores: then a wait should leave its core to others. The same on all ranks.
  virtual bool oversubscribed() const = 0;
  /// Whether all ranks map the same memory, and may write to each other's. The same on all ranks.
  virtual bool shares_memory() const = 0;

 protected:
  ~Ranks() = default;
};

}  // namespace multiring
