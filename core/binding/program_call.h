#pragma once

#include <cstdint>

#include "binding/gil.h"
#include "engine/program_calls.h"

namespace multiring::binding {

/// A call of the program that communicates: it is counted (ProgramCalls), and releases the lock.
class ProgramCall : GilRelease {
 public:
  explicit ProgramCall(std::uint64_t waits_on = 0) { ProgramCalls::begin(waits_on); }
  ~ProgramCall() { ProgramCalls::end(); }
};

}  // namespace multiring::binding
