#pragma once

#include <unistd.h>

#include <memory>
#include <vector>

#include "binding/arrays/array_view.h"
#include "engine/communicator.h"
#include "engine/work.h"

namespace multiring::binding {

/// A handle to work, for Python.
struct PyWork {
  std::shared_ptr<Work> work;
  std::weak_ptr<Communicator> communicator = {};  ///< that runs it; empty: a named queue's
  std::uint64_t waits_on = 0;                     ///< number of the communicator, or those of the queue
  pid_t process = ::getpid();
};

/// Arrays held by work may be released on the progress thread.
std::shared_ptr<void> keep_alive(std::shared_ptr<std::vector<ArrayView>> views, py::object owners = {});

}  // namespace multiring::binding
