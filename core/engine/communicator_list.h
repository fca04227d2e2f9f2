#pragma once

#include <string>

#include "base/export.h"

namespace multiring {

class Communicator;

/// The communicators of the process. In a child that it forks, by whatever means (a native library's fork()
/// knows nothing of Python's hooks), all are abandoned: the child's copies of sockets would keep peers from
/// noticing the parent's end.
class MULTIRING_API CommunicatorList {
 public:
  static void add(Communicator* communicator);
  static void remove(Communicator* communicator);
  /// What the rank of that number in the world waits for this rank in, in any other communicator than `here`:
  /// "barrier of communicator 'world/1.0'"; empty: nothing is known.
  static std::string waits_elsewhere(const Communicator* here, int world_rank);
};

}  // namespace multiring
