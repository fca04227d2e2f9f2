#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/export.h"
#include "transport/mpi/bridge/multiring_mpi.h"
#include "transport/transport.h"

namespace multiring {

/// An MPI library, and a communicator of its own among the ranks of a job.
class MULTIRING_API MpiSession {
 public:
  /// `bridge`: path of what `multiring build mpi` has made. `communicator`: the address of an MPI_Comm; null:
  /// all ranks of the job. Initialises MPI unless that is done. Collective. Raises a usage error where the
  /// bridge or its MPI cannot be used.
  static std::shared_ptr<MpiSession> load(const std::string& bridge, const void* communicator);
  /// Name and version of the MPI library of a bridge, which is loaded and not initialised.
  static std::string library_of(const std::string& bridge);
  /// With functions that are linked in.
  MpiSession(const multiring_mpi& functions, const void* communicator);
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  int rank() const { return functions_.rank(group_); }
  int size() const { return functions_.size(group_); }
  std::string library() const { return functions_.library(); }
  /// Ends MPI if this session has initialised it. Collective; nothing may be called afterwards.
  void finalize() { functions_.finalize(); }

  const multiring_mpi& functions() const { return functions_; }
  multiring_mpi_group* group() const { return group_; }

  /// `count` tags from the returned one on for the network of this name, which is given once and is the same
  /// on all its ranks. Raises an internal error where two names fall on the same tags, before any message of
  /// one could be taken for the other's.
  int claim_tags(const std::string& name, int count);
  /// What `root` has, at most kBroadcastBytes, on all ranks. Collective.
  std::string broadcast(const std::string& value, int root, const Waiting& waiting);
  static constexpr std::size_t kBroadcastBytes = 4096;
  /// Memory of what was given up, which MPI may still read or write: stays as long as this session.
  void keep(std::shared_ptr<const void> memory);

 private:
  void complete(std::span<multiring_mpi_request> requests, std::span<std::size_t> bytes,
                const Waiting& waiting) const;

  const multiring_mpi& functions_;
  multiring_mpi_group* group_ = nullptr;
  std::mutex mutex_;  // guards what follows
  std::map<int, std::string> claimed_;
  std::vector<std::shared_ptr<const void>> kept_;
};

}  // namespace multiring
