#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/export.h"
#include "base/job_settings.h"
#include "transport/mpi/mpi_session.h"
#include "transport/store.h"
#include "transport/transport.h"

namespace multiring {

/// The rank of this process, and how it connects to the others.
struct WorldAddress : JobSettings {
  explicit WorldAddress(const JobSettings& settings = {}) : JobSettings(settings) {}

  int rank = 0;
  int size = 1;
  /// Whether the ranks may be on several hosts; the same on all.
  bool spread = false;
  /// What the launcher calls the host of each rank, for messages; empty: it has not said.
  std::vector<std::string> hosts;
  std::string socket_directory;  ///< see SocketMesh::Options
  std::string job;
  std::string secret;  ///< known only to the ranks of the job; needed between hosts
  /// Versions of the library and its protocol; compared with the others'.
  std::string build;
  /// Takes the warning that ranks have not come after `stall_warning` seconds.
  std::function<void(const std::string&)> warn;
  /// Used between hosts instead of TCP; on all ranks or on none.
  std::shared_ptr<MpiSession> mpi;
};

/// "rank 3 of 4 (on host-b)": ranks that have not come, and where they should run if that is known.
std::string missing_ranks(const WorldAddress& address, const std::vector<int>& missing);

/// The world's transport: shared memory within hosts, TCP or MPI between them. Collective.
MULTIRING_API std::shared_ptr<Transport> connect_world(const std::shared_ptr<Store>& store,
                                                       const WorldAddress& address,
                                                       const WaitOptions& waiting);

}  // namespace multiring
