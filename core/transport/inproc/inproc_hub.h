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

/// Ranks as threads of one process, for tests and simulation. Faults are injected per rank.
class MULTIRING_API InprocHub : public std::enable_shared_from_this<InprocHub> {
 public:
  struct Options {
    SharedTransportOptions transport;
    int cores = 1;
  };

  InprocHub(int size, const Options& options);

  int size() const { return static_cast<int>(faults_.size()); }
  /// The world's transport of `rank`.
  std::shared_ptr<Transport> connect(int rank, const WaitOptions& waiting);
  /// The host group of `rank`, for another transport.
  std::shared_ptr<HostGroup> host_group(int rank);

  /// From now on `rank` arrives later by this much at every round.
  void delay(int rank, std::chrono::microseconds by);
  /// From now on neither the arrivals nor the messages of `rank` come through, and its own waits do not end.
  void drop(int rank);
  /// To its peers `rank` looks like a process that has died.
  void break_rank(int rank);

 private:
  friend class InprocHostGroup;
  friend class InprocTransport;
  struct Faults {
    std::atomic<std::int64_t> delay_microseconds{0};
    std::atomic<bool> dropped{false};
    std::atomic<bool> broken{false};
  };
  /// Memory that not all members have taken yet.
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
