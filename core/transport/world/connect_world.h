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

/// Who this rank is, and how it reaches the others.
struct WorldAddress {
  int rank = 0;
  int size = 1;
  /// Whether the ranks may be on several hosts; the same on all.
  bool spread = false;
  /// Ranks with the same name share memory; empty: as the kernel tells.
  std::string host;
  std::string socket_directory;  ///< see PeerLinks::Options
  /// What the ranks of the job know and nobody else does; needed for TCP between hosts.
  std::string secret;
  std::string job;
  std::vector<std::string> interfaces;  ///< see TcpOptions
  std::string mode;                     ///< see CommunicatorOptions; compared with the others'
  std::string tuning;                   ///< the same
  /// Carries what goes between hosts, in place of TCP; on all ranks or on none.
  std::shared_ptr<MpiSession> mpi;
  std::string wire;   ///< the same
  std::string build;  ///< version of the library and of what it speaks; compared with the others'
  SharedTransportOptions transport;
};

/// The world's transport: shared memory on one host; on several, that and TCP or MPI between them. The store
/// is kept as long as the transport lives if there are several. Collective.
MULTIRING_API std::shared_ptr<Transport> connect_world(const std::shared_ptr<Store>& store,
                                                       const WorldAddress& address, const Waiting& waiting);

}  // namespace multiring
