#pragma once

#include <functional>
#include <memory>

#include "base/export.h"
#include "engine/communicator.h"

/// A communicator of the C ABI. Its address stays valid after the communicator is closed: operations are
/// refused then.
struct MULTIRING_API mr_communicator {
  std::shared_ptr<multiring::Communicator> communicator;
  /// Called from time to time in a thread that waits; an exception that it throws ends the wait. May be
  /// empty.
  std::function<void()> interrupt = {};
};
