#pragma once

#include "base/export.h"
#include "base/immovable.h"

namespace multiring {

/// Instruction sets that the reduction kernels are compiled for. kPlain is what every processor of the
/// architecture has: SSE2 on x86-64, NEON on aarch64.
enum class Isa { kPlain = 0, kAvx2 = 1, kAvx512 = 2 };
inline constexpr Isa kAllIsas[] = {Isa::kPlain, Isa::kAvx2, Isa::kAvx512};

MULTIRING_API const char* isa_name(Isa isa);
/// Whether the processor has the instruction set and the operating system saves its registers.
MULTIRING_API bool cpu_supports(Isa isa);

/// While it lives, floating point in this thread rounds to nearest even and keeps denormals.
///
/// Applications change this per thread (switches that flush denormals, libraries linked with -ffast-math),
/// and an operation may run in the caller's thread or in the engine's: the same inputs must give the same
/// bits in both.
class MULTIRING_API StandardFloatMode : Immovable {
 public:
  StandardFloatMode();
  ~StandardFloatMode();

 private:
  unsigned long long saved_ = 0;
  bool changed_ = false;
};

}  // namespace multiring
