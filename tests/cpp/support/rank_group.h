#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/host_links.h"
#include "engine/communicator.h"
#include "support/network/inproc_mpi.h"
#include "support/network/watched_network.h"
#include "support/sanitizer.h"
#include "support/threads.h"
#include "transport/cluster/cluster_transport.h"
#include "transport/inproc/inproc_hub.h"
#include "transport/store.h"
#include "transport/transport.h"

namespace multiring::testing {

/// kClusterMpi: as kCluster, with MPI between hosts (InprocMpi). kClusterRelayed: as kCluster, with rounds
/// that pass from host to host, as among many. kClusterRing, kClusterLine: only neighbours may connect.
enum class TransportKind {
  kInproc,
  kShm,
  kCluster,
  kClusterMpi,
  kClusterRelayed,
  kClusterRing,
  kClusterLine
};
inline constexpr TransportKind kTransports[] = {TransportKind::kInproc, TransportKind::kShm,
                                                TransportKind::kCluster};
/// "inproc", "shm", "cluster", "cluster_mpi", ...
const char* transport_name(TransportKind kind);
inline void PrintTo(TransportKind kind, std::ostream* out) { *out << transport_name(kind); }

/// Tests with a parameter are named by how it is printed.
inline constexpr ::testing::PrintToStringParamName kPrinted{};

/// Counts the calls of all ranks.
class CountedStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value, const WaitOptions& waiting) override {
    ++calls_;
    store_.set(key, value, waiting);
  }
  std::string get(const std::string& key, double seconds, const WaitOptions& waiting) override {
    ++calls_;
    return store_.get(key, seconds, waiting);
  }
  std::size_t calls() const { return calls_; }

 private:
  InprocStore store_;
  std::atomic<std::size_t> calls_{0};
};

struct GroupOptions {
  TransportKind transport = TransportKind::kInproc;
  int size = 2;
  std::size_t staging_bytes = SharedTransportOptions{}.staging_bytes;
  double spin_microseconds = JobSettings{}.spin_microseconds;
  int cores = 1;            ///< that the ranks believe they have; inproc only
  int hosts = 2;            ///< that the ranks are spread over; cluster only
  std::vector<int> layout;  ///< ranks of each host, of which the first has the first; empty: `hosts` tells
  /// Of the communicators; its timeout is far below the group's limit.
  CommunicatorOptions communicator;
  /// Seconds that the ranks may take; then the process ends, for a thread that hangs cannot be stopped.
  double time_limit = 60.0 * kSlowness;

  GroupOptions() { communicator.timeout = 20.0 * kSlowness; }
  GroupOptions(TransportKind kind, int ranks, std::size_t staging = SharedTransportOptions{}.staging_bytes)
      : GroupOptions() {
    transport = kind;
    size = ranks;
    staging_bytes = staging;
  }
};

/// Ranks that are threads of this process.
class RankGroup {
 public:
  using Body = std::function<void(Communicator&)>;
  using TransportBody = std::function<void(const std::shared_ptr<Transport>&)>;

  explicit RankGroup(const GroupOptions& options);

  int size() const { return options_.size; }
  /// To inject faults; inproc only.
  InprocHub& hub() const { return *hub_; }

  /// The networks of `rank` fail from here on when they send or ask for errors; cluster only.
  void break_networks(int rank) { networks_[static_cast<std::size_t>(rank)]->failing = true; }
  /// From here on `rank` learns nothing from other hosts but that another rank has aborted; cluster only.
  void withhold_messages(int rank) { networks_[static_cast<std::size_t>(rank)]->withholding = true; }
  /// What `rank` has sent to other hosts so far; cluster only.
  const WatchedNetworks& sent(int rank) const { return *networks_[static_cast<std::size_t>(rank)]; }

  /// Calls of the store in the run that is under way.
  std::size_t store_calls() const { return store_->calls(); }

  /// Runs `body` in one thread for each rank, when all have connected, and raises what the first rank to fail
  /// raised. A rank that fails breaks the communicator for all, so that none waits for it. Communicators stay
  /// open until all have ended.
  void run(const Body& body);
  /// The same, but gives what each rank raised; empty: nothing. Raises what is no error of multiring.
  std::vector<std::optional<Error>> outcomes(const Body& body);
  /// Runs `body` with the transports alone.
  void run_transports(const TransportBody& body);

 private:
  int host_of(int rank) const;
  HostLinks host_links() const;
  /// Whether the `self`-th of `members`, world ranks, may connect with another one of them.
  std::function<bool(int peer)> linked_peers(std::span<const int> members, int self) const;
  void build_cluster(const InprocHub::Options& options);
  void renew_mpi();
  /// Returns when all ranks have connected or failed to.
  std::shared_ptr<Transport> connect_all(int rank, Store& store, Latch& connected) const;
  std::shared_ptr<Transport> connect(int rank, Store& store) const;
  std::shared_ptr<Transport> connect_cluster(int rank, Store& store, const WaitOptions& waiting) const;
  ClusterContext::MakeNetwork network_maker(int rank, Store& store) const;
  /// Runs `body(rank)` in a thread each; what they raised, and the rank that was first to raise.
  std::vector<std::exception_ptr> run_threads(const std::function<void(int)>& body, int* first) const;
  std::vector<std::exception_ptr> run_communicators(const Body& body, int* first);

  GroupOptions options_;
  std::shared_ptr<InprocHub> hub_;
  // kCluster: the memory of each host, who is where, and what is between them.
  std::vector<std::shared_ptr<InprocHub>> hosts_;
  std::vector<ClusterRank> places_;
  std::unique_ptr<InprocMpi> mpi_;
  std::unique_ptr<CountedStore> store_;                     // of the last run
  std::vector<std::unique_ptr<WatchedNetworks>> networks_;  // of each rank
};

}  // namespace multiring::testing
