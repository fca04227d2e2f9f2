#pragma once

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/communicator.h"

namespace multiring::testing {

/// Ranks that are processes, over shared memory, so that they can be killed. To be made while this process
/// has one thread only.
class Processes {
 public:
  /// What a rank leaves behind; in memory shared with it.
  struct Report {
    std::atomic<int> progress{0};  ///< counted up by the body
    std::atomic<int> number{0};    ///< anything that the body has to tell
    std::atomic<bool> raised{false};
    ErrorKind kind{};  ///< of the error of multiring that the body raised
    double at = 0;     ///< when, by seconds_now()
    char text[2000] = {};
  };
  using Body = std::function<void(Communicator&, Report&)>;

  /// Runs `body` in `size` processes. A body that raises reports it; one that returns closes its
  /// communicator.
  Processes(int size, const Body& body);
  /// Kills those that still run.
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  Report& report(int rank) { return reports_[rank]; }
  /// Returns when every rank has counted up to `progress`; false if that takes too long.
  bool await_progress(int progress);
  void kill(int rank);
  /// Returns when all have ended; false if that takes too long.
  bool wait();
  /// Steady time of the host.
  static double seconds_now();

 private:
  void run_rank(int rank, const Body& body);

  int size_;
  std::string directory_;
  Report* reports_;
  std::vector<pid_t> running_;  // 0: has ended
};

}  // namespace multiring::testing
