#pragma once

#include <sched.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/unique_fd.h"
#include "transport/store.h"
#include "transport/waiting.h"

namespace multiring {

/// Unix sockets between every two ranks of a host. They pass descriptors of shared memory, and show when a
/// peer's process has ended, as does its pidfd where the kernel provides one.
class SocketMesh {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    /// Existing directory of mode 0700 for the listening socket, until the constructor ends; may be empty.
    std::string socket_directory;
    /// Has to be the same on all ranks.
    std::uint64_t settings = 0;
    /// The same: version of the library. The first 64 bytes are compared.
    std::string build;
  };

  /// Connects all ranks through `store`. Collective.
  SocketMesh(Store& store, const Options& options, const WaitOptions& waiting);

  std::int64_t process_id(int rank) const { return peers_[static_cast<std::size_t>(rank)].process_id; }
  bool is_lost(int rank) const;
  /// Closes this process's copies of all descriptors (it is a fork of the rank's).
  void abandon();
  /// Cores that at least one rank may run on, or fewer if a quota says so. The same on all ranks.
  int cores() const { return cores_; }

  void send_file(int peer, std::uint64_t tag, const UniqueFd& file);
  /// The file that `peer` sent under `tag`; files under other tags are kept for their own receivers.
  UniqueFd receive_file(int peer, std::uint64_t tag, const WaitOptions& waiting);

 private:
  struct Peer {
    UniqueFd socket;
    UniqueFd process;  // pidfd; empty where there is none
    std::int64_t process_id = 0;
  };
  struct Hello;

  Hello my_hello() const;
  /// Returns the context of an error in init that concerns a peer.
  ErrorContext context_of_init(int peer) const;
  void connect_all(Store& store, const WaitOptions& waiting);
  std::string look_up(Store& store, int peer, const WaitOptions& waiting) const;
  UniqueFd connect_to(int peer, const std::string& path) const;
  void await_readable(const UniqueFd& socket, const WaitOptions& waiting) const;
  void accept_from_higher(const UniqueFd& listener, const WaitOptions& waiting);
  /// Receives a peer's hello, answers it if asked to, and adds the peer. Its rank; -1: not part of the job.
  int receive_hello(UniqueFd socket, bool answer);
  /// Ranks that are not connected, and ranks that have not published an address.
  std::vector<int> missing() const;
  std::vector<int> unpublished(Store& store, const WaitOptions& waiting) const;
  bool receive_one(int peer);

  Options options_;
  std::vector<Peer> peers_;
  cpu_set_t own_cpus_;
  cpu_set_t cpus_;  // of all ranks
  int own_quota_;
  int cores_;
  std::mutex mutex_;  // guards files_ and the order of receives; never held while another lock is taken
  std::map<std::pair<int, std::uint64_t>, UniqueFd> files_;
};

}  // namespace multiring
