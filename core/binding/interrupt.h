#pragma once

#include <functional>

#include "engine/communicator.h"

namespace multiring::binding {

/// Runs Python's signal handlers (Ctrl-C) from a waiting thread; raises what they raise.
const std::function<void()>& check_signals();

/// How a call from Python waits: `timeout` in seconds, negative for the communicator's default.
inline CallOptions call_options(double timeout) { return {timeout, &check_signals()}; }

}  // namespace multiring::binding
