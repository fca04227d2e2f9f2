#pragma once

#include "collective/exchange.h"
#include "collective/operation.h"

namespace multiring {

// Where the arrays of an operation lie on devices, this is how it reaches them: the one place that copies
// them to host memory and back, whatever the operation does. Each does nothing for an operation without such
// arrays.

/// In the thread that issues the operation, when it has been checked: asks for copies of what it reads,
/// ordered after the program's work so far, and lets the operation work on these.
void copy_from_devices(Operation& operation, int rank);

/// Before the operation runs: returns when the copies are there. Raises what `check` raises, which is called
/// every few milliseconds; a timeout error; or an internal error if the device has failed.
void await_copies(Operation& operation, const WaitOptions& waiting, const std::function<void()>& check);

/// When it has run: returns when the results are on their devices.
void copy_to_devices(Operation& operation, int rank);

}  // namespace multiring
