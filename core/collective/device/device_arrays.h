#pragma once

#include <functional>
#include <string>

#include "collective/agreement/round_exchange.h"
#include "collective/operation.h"

namespace multiring {

// Where the arrays of an operation lie on devices, this is how it reaches them: the one place that copies
// them to host memory and back, whatever the operation does. Each does nothing for an operation without such
// arrays.

/// In the thread that issues the operation, when it has been checked: asks for copies of what it reads,
/// ordered after the program's work so far, and lets the operation work on these. Where this rank offers to
/// work by NCCL it only notes what the program has done so far.
void copy_from_devices(Operation& operation, int rank);

/// Before the operation runs, each time: whether it asks for its arrays part by part, so that they are copied
/// while it runs. `alone`: it is not fused with others.
void decide_on_parts(Operation& operation, const RoundExchange& exchange, bool alone);

/// Before the operation runs: returns when the copies, or the first of them, are there. Raises the error of a
/// peer, a timeout error, or a DeviceError. Where nothing is copied the device waits, and not the host.
void await_copies(const Operation& operation, const RoundExchange& exchange, const OperationCall& call);

/// Where NCCL or peer memory is not to run it after all: copies the arrays to the host, as they would have
/// been before.
void copy_after_all(Operation& operation, const RoundExchange& exchange, const OperationCall& call);
/// Where it is: the operation works on the arrays where they lie, and has its result allocated there.
void stay_on_devices(Operation& operation);

/// Returns when `is_done`. Raises what else ends a wait: the error of a peer, unless none is needed any
/// more, which may have left then, or a timeout error that says `for_what`.
void poll(const RoundExchange& exchange, const OperationCall& call, const std::function<bool()>& is_done,
          const std::string& for_what, bool needs_peers = true);

/// In an operation that asks part by part: before it reads the input up to `end`. In one that runs where its
/// arrays lie: returns when the program's work is done that it comes after.
void await_part(const Operation& operation, std::size_t end, const RoundExchange& exchange,
                const OperationCall& call);
/// The same: what the output has up to `end` is final.
void return_part(const Operation& operation, std::size_t end);

/// When it has run: returns when the results are on their devices.
void copy_to_devices(Operation& operation, int rank);

/// When it has failed: returns when no copy writes to the program's arrays any more.
void abandon_copies(Operation& operation);

}  // namespace multiring
