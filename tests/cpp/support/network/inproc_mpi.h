#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "base/immovable.h"
#include "transport/mpi/bridge/multiring_mpi.h"
#include "transport/mpi/mpi_network.h"
#include "transport/mpi/mpi_session.h"

namespace multiring::testing {

/// What an MPI library does for the bridge, among threads of this process: messages match by sender and tag
/// in the order in which they were sent; short ones are copied at once, long ones when their receive is
/// there.
class InprocMpi : Immovable {
 public:
  explicit InprocMpi(int size);
  ~InprocMpi();
  int size() const { return static_cast<int>(ranks_.size()); }
  /// A session for the thread that is `rank`.
  std::shared_ptr<MpiSession> session(int rank);

  /// What the functions of the bridge work on.
  struct Rank;
  struct Request {
    Rank* poster = nullptr;
    bool is_send = false;
    bool done = false;
    int outcome = MULTIRING_MPI_DONE;
    int source = 0;
    int tag = 0;
    std::vector<multiring_mpi_part> parts;  ///< of a send that is not done
    std::vector<std::byte> copy;            ///< of a send that is done already
    std::byte* memory = nullptr;            ///< of a receive
    std::size_t bytes = 0;                  ///< to send; that fit; that came
  };
  struct Rank {
    InprocMpi* world = nullptr;
    int number = 0;
    std::list<std::shared_ptr<Request>> arrived;  ///< sends without a receive
    std::list<std::shared_ptr<Request>> posted;   ///< receives without a send
    std::set<std::shared_ptr<Request>*> handles;  ///< that were given and not used up
  };
  std::mutex mutex;  // guards all ranks
  Rank& rank(int number) { return ranks_[static_cast<std::size_t>(number)]; }

 private:
  std::vector<Rank> ranks_;
};

/// Options of a network among all ranks of `mpi`.
MpiOptions mpi_options(int rank, int size, int channels, const std::string& name);

}  // namespace multiring::testing
