#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/export.h"
#include "transport/mpi/mpi_session.h"
#include "transport/shared/shared_transport.h"
#include "transport/store.h"
#include "transport/tcp/tcp_options.h"
#include "transport/transport.h"

namespace multiring {

/// The rank of this process, and how it connects to the others.
struct WorldAddress {
  int rank = 0;
  int size = 1;
  /// Whether the ranks may be on several hosts; the same on all.
  bool spread = false;
  /// Ranks with the same name share memory; empty: decided by the kernel's identity.
  std::string host;
  /// What the launcher calls the host of each rank, for messages; empty: it has not said.
  std::vector<std::string> hosts;
  std::string socket_directory;  ///< see SocketMesh::Options
  std::string job;
  /// Versions of the library and its protocol; compared with the others'.
  std::string build;
  /// Settings that have to be the same on all ranks: names, for messages, and values without line breaks.
  std::vector<std::pair<std::string, std::string>> compared;
  /// Takes the warning that ranks have not come after `late_after` seconds (0: none).
  std::function<void(const std::string&)> warn_late;
  double late_after = 0.0;
  /// Used between hosts instead of TCP; on all ranks or on none.
  std::shared_ptr<MpiSession> mpi;
  SharedTransportOptions transport;
  /// Between hosts; ranks, job and channels are set for each network.
  TcpOptions tcp;
};

/// "rank 3 of 4 (on host-b)": ranks that have not come, and where they should run if that is known.
std::string missing_ranks(const WorldAddress& address, const std::vector<int>& missing);

/// The world's transport: shared memory within hosts, TCP or MPI between them. Collective.
MULTIRING_API std::shared_ptr<Transport> connect_world(const std::shared_ptr<Store>& store,
                                                       const WorldAddress& address,
                                                       const WaitOptions& waiting);

}  // namespace multiring
