#pragma once

#include <vector>

#include "collective/descriptor.h"
#include "support/oracles/problem.h"

namespace multiring::testing {

/// What an allreduce of float32 gives whose elements cross from host to host as `comm_dtype`, by its
/// description: each host rounds what it has added up (the nodes of the canonical tree that its ranks are),
/// these are added in float32, and the result is rounded. `problem`: one of make_problem(). `host_of`: the
/// number of each rank's host.
Bytes comm_dtype_oracle(CommDtype comm_dtype, const ReduceProblem& problem, const std::vector<int>& host_of);

/// How far that may be from the exact sum of an element, for elements whose magnitudes add up to `magnitude`:
/// each host's sums and the result are rounded once, and float32 adds up with errors of its own.
double comm_dtype_error_bound(CommDtype comm_dtype, int ranks, double magnitude);

}  // namespace multiring::testing
