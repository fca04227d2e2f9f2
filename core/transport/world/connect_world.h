#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/export.h"
#include "transport/mpi/mpi_session.h"
#include "transport/shared/shared_transport.h"
#include "transport/store.h"
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
  std::string socket_directory;  ///< see SocketMesh::Options
  /// Known only to the ranks of the job; needed for TCP between hosts.
  std::string secret;
  std::string job;
  std::vector<std::string> interfaces;  ///< see TcpOptions
  std::string mode;                     ///< see CommunicatorOptions; compared with the others'
  std::string tuning;                   ///< the same
  /// Used between hosts instead of TCP; on all ranks or on none.
  std::shared_ptr<MpiSession> mpi;
  std::string comm_dtype;  ///< the same
  std::string build;       ///< versions of the library and its protocol; compared with the others'
  SharedTransportOptions transport;
};

/// The world's transport: shared memory within hosts, TCP or MPI between them. Collective.
MULTIRING_API std::shared_ptr<Transport> connect_world(const std::shared_ptr<Store>& store,
                                                       const WorldAddress& address, const Waiting& waiting);

}  // namespace multiring
