#pragma once

#include <memory>

#include "base/export.h"
#include "transport/shared/shared_transport.h"
#include "transport/shm/socket_mesh.h"
#include "transport/store.h"

namespace multiring {

struct ShmOptions {
  int rank = 0;
  int size = 1;
  std::string socket_directory;  ///< see SocketMesh::Options
  SharedTransportOptions transport;
  std::string build;  ///< see SocketMesh::Options
};

/// The group of the processes of one host. Collective.
MULTIRING_API std::shared_ptr<HostGroup> make_shm_group(Store& store, const SocketMesh::Options& options,
                                                        const WaitOptions& waiting);

/// The world's transport if all processes are on one host. Collective.
MULTIRING_API std::shared_ptr<Transport> connect_shm(Store& store, const ShmOptions& options,
                                                     const WaitOptions& waiting);

}  // namespace multiring
