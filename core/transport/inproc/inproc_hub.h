#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/export.h"
#include "transport/shared/shared_transport.h"

namespace multiring {

/// Ranks as threads of one process, over its own memory: for tests and simulation. Faults are injected per
/// rank.
class MULTIRING_API InprocHub : public std::enable_shared_from_this<InprocHub> {
 public:
  struct Options {
    SharedTransportOptions transport;
    int cores = 1;
  };

  InprocHub(int size, const Options& options);

  int size() const { return static_cast<int>(faults_.size()); }
  /// The world's transport of `rank`.
  std::shared_ptr<Transport> connect(int rank, const Waiting& waiting);
  /// What `rank` shares with the others, to build another transport on.
  std::shared_ptr<HostLink> link(int rank);

  /// From now on `rank` arrives at every round later by this much.
  void delay(int rank, std::chrono::microseconds by);
  /// From now on nobody learns what `rank` does: neither its arrivals nor its messages come through, and it
  /// waits in vain itself.
  void drop(int rank);
  /// The process of `rank` is gone, as its peers see it, in the middle of whatever it does.
  void break_rank(int rank);

 private:
  friend class InprocLink;
  friend class InprocTransport;
  struct Faults {
    std::atomic<std::int64_t> delay_microseconds{0};
    std::atomic<bool> dropped{false};
    std::atomic<bool> broken{false};
  };
  /// Memory that waits for those of its members that have not taken it yet.
  struct Offer {
    std::shared_ptr<SharedBlock> block;
    std::size_t taken = 0;
  };
  std::shared_ptr<SharedBlock> block(std::uint64_t tag, std::span<const int> members, std::size_t bytes);

  Options options_;
  std::vector<Faults> faults_;
  std::mutex mutex_;  // guards blocks_; never held while another lock is taken
  std::map<std::pair<std::uint64_t, int>, Offer> blocks_;
};

}  // namespace multiring
