#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/export.h"

namespace multiring {

class Communicator;

/// What a communicator of this process is doing, and for which ranks it waits.
struct WaitInProgress {
  /// Name of a rank, its host, and its process there.
  using Place = std::tuple<std::string, std::string, std::int64_t>;

  std::uint64_t number;      ///< of the communicator
  std::string communicator;  ///< its name, or that of the named queue which has it
  std::string operation;     ///< "barrier of communicator 'world'"
  Place on;
  std::vector<Place> late;  ///< that have not come to the operation; none: it waits for none
};

/// What follows the name of a named queue in that of the communicator by which its ranks agree on names.
inline constexpr const char* kNamesOfQueue = "/names";

/// The communicators of the process. A forked child abandons all of them (a native library's fork() does not
/// run Python's hooks): its copies of sockets would keep peers from noticing the parent's end.
class MULTIRING_API CommunicatorList {
 public:
  static void add(Communicator* communicator);
  static void remove(Communicator* communicator);
  /// The operation in which a world rank waits for this rank in another communicator than `here`: "barrier of
  /// communicator 'world/1.0'"; empty: unknown.
  static std::string find_other_wait(const Communicator* here, int world_rank);
  /// What has ended another communicator of this rank's world that a world rank is in, too; empty: nothing.
  static std::string find_other_end(const Communicator* here, int world_rank);
  /// What is in progress in all communicators.
  static std::vector<WaitInProgress> waits();
  /// The communicators with these names, which are those of WaitInProgress::communicator, in their order.
  static std::vector<std::shared_ptr<Communicator>> find(const std::vector<std::string>& names);
  /// Breaks communicators by a mismatch, on all of their ranks, in the order of `names`: the process may end
  /// as soon as the one is broken that its program waits in, which should be the last.
  static void fail(const std::vector<std::string>& names, const std::string& message);
};

}  // namespace multiring
