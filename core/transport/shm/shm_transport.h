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
  std::string socket_directory;  ///< see PeerLinks::Options
  SharedTransportOptions transport;
  std::string build;  ///< see PeerLinks::Options
};

/// The link between the processes of one host. Collective.
MULTIRING_API std::shared_ptr<HostLink> make_shm_link(Store& store, const PeerLinks::Options& options,
                                                      const Waiting& waiting);

/// The world's transport of the processes of one host. Collective.
MULTIRING_API std::shared_ptr<Transport> connect_shm(Store& store, const ShmOptions& options,
                                                     const Waiting& waiting);

}  // namespace multiring
