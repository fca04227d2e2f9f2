#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/export.h"
#include "transport/shared/wait_point.h"
#include "transport/waiting.h"

namespace multiring {

/// A block of memory shared by some ranks of a host; zero-filled when new.
class SharedBlock {
 public:
  virtual ~SharedBlock() = default;
  virtual std::byte* data() const = 0;
};

/// The ranks of one host, which share memory and notice each other's death. Ranks are local ranks.
class MULTIRING_API HostGroup {
 public:
  virtual ~HostGroup() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string host() const = 0;
  virtual std::int64_t process_id(int rank) const = 0;
  /// Of the world, which may be on several hosts.
  virtual int world_rank(int rank) const { return rank; }

  /// A block that all `members` map. Collective among them; members[0] creates it. No `tag` is used twice.
  virtual std::shared_ptr<SharedBlock> share(std::size_t bytes, std::span<const int> members,
                                             std::uint64_t tag, const WaitOptions& waiting) = 0;
  /// Whether the process of `rank` has ended. Costs a system call.
  virtual bool is_lost(int rank) = 0;
  /// Sleeps until the ranks at `point`, whose epoch was `epoch`, are woken; at most `seconds`, maybe less.
  virtual void sleep(WaitPoint& point, std::uint32_t epoch, double seconds) {
    futex_wait(point.epoch, epoch, seconds);
  }
  /// Wakes all ranks that sleep at `point`.
  virtual void wake(WaitPoint& point) { point.notify_all(); }
  /// See Transport::abandon.
  virtual void abandon() = 0;
  /// Cores that the ranks of this host may use together. More ranks than that must not spin.
  virtual int cores() const = 0;
};

}  // namespace multiring
