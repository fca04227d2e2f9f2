#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/export.h"
#include "base/immovable.h"
#include "transport/mpi/bridge/multiring_mpi.h"
#include "transport/waiting.h"

namespace multiring {

/// An MPI library, with a communicator for multiring among the ranks of a job.
class MULTIRING_API MpiSession : Immovable {
 public:
  /// `bridge`: path of the library that `multiring build mpi` has built. `communicator`: the address of an
  /// MPI_Comm; null: all ranks of the job. Initialises MPI unless that is done. Collective. Raises a usage
  /// error where the bridge or its MPI cannot be used.
  static std::shared_ptr<MpiSession> load(const std::string& bridge, const void* communicator);
  /// Name and version of the MPI library of a bridge. Does not initialise it.
  static std::string library_of(const std::string& bridge);
  /// With functions of this program.
  MpiSession(const multiring_mpi& functions, const void* communicator);

  int rank() const { return functions_.rank(group_); }
  int size() const { return functions_.size(group_); }
  std::string library() const { return functions_.library(); }
  /// Ends MPI if this session has initialised it. Collective; nothing may be called afterwards.
  void finalize() { functions_.finalize(); }

  const multiring_mpi& functions() const { return functions_; }
  multiring_mpi_group* group() const { return group_; }

  /// The first of `count` tags for the network of this name, which is the same on all its ranks and used
  /// once. Raises an internal error if two names get the same tags.
  int reserve_tags(const std::string& name, int count);
  /// The value of `root`, at most kBroadcastBytes. Collective.
  std::string broadcast(const std::string& value, int root, const WaitOptions& waiting);
  static constexpr std::size_t kBroadcastBytes = 4096;
  /// Keeps the memory of messages that were given up, which MPI may still access.
  void keep(std::shared_ptr<const void> memory);

 private:
  void complete(std::span<multiring_mpi_request> requests, std::span<std::size_t> bytes,
                const WaitOptions& waiting) const;

  const multiring_mpi& functions_;
  multiring_mpi_group* group_ = nullptr;
  std::mutex mutex_;  // guards what follows
  std::map<int, std::string> reserved_;
  std::vector<std::shared_ptr<const void>> kept_;
};

}  // namespace multiring
