#pragma once

#include <cstdint>
#include <vector>

#include "base/export.h"
#include "collective/operation.h"

namespace multiring {

/// Address ranges that do not overlap, in ascending order, each with the number of the last operation that
/// uses it. A range that overlaps others is joined with them: a search finds too much rather than too little.
class MULTIRING_API RangeSet {
 public:
  /// Returns the largest number of the ranges that share a byte with [begin, end); 0: there is none.
  std::uint64_t last_in(std::uintptr_t begin, std::uintptr_t end) const;
  void insert(std::uintptr_t begin, std::uintptr_t end, std::uint64_t number);
  /// Removes the ranges whose numbers are less than `oldest`.
  void remove_before(std::uint64_t oldest);
  std::size_t size() const { return ranges_.size(); }
  void clear() { ranges_.clear(); }

 private:
  struct Range {
    std::uintptr_t begin, end;
    std::uint64_t number;
  };
  std::vector<Range> ranges_;
};

/// Returns whether one of two operations writes memory that the other one reads or writes.
MULTIRING_API bool share_memory(const Operation& a, const Operation& b);

/// The memory that queued operations read and write. Two operations conflict where one of them writes what
/// the other one reads or writes: the one submitted later has to wait for the earlier one, and cannot be
/// fused with it.
///
/// Operations have ascending numbers, from 1. Numbers below `oldest` have ended, and conflict with nothing.
/// Not thread-safe.
class MULTIRING_API MemoryInFlight {
 public:
  /// Returns the number of the last operation that conflicts with `operation`, at least `oldest`; 0: none.
  std::uint64_t last_conflict(const Operation& operation, std::uint64_t oldest) const;
  /// Adds the memory of `operation`, whose number is not less than those before it. Returns the number that
  /// last_conflict returned before.
  std::uint64_t add(const Operation& operation, std::uint64_t number, std::uint64_t oldest);
  /// Forgets everything: no operation is queued.
  void clear();

 private:
  RangeSet read_, written_;
  std::size_t remove_at_ = 64;  // ranges at which those that have ended are looked for
};

}  // namespace multiring
