#include "base/cpu.h"

#include "base/names.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

namespace multiring {
namespace {

// The control register of floating point: rounding mode, flushing of denormals, exceptions that trap.
#if defined(__x86_64__)
constexpr unsigned long long kStandardControl = 0x1f80;  // to nearest, denormals kept, every exception masked
constexpr unsigned long long kControlMask = 0xffc0;      // the low six bits are sticky flags, not control
unsigned long long read_control() { return _mm_getcsr(); }
void write_control(unsigned long long value) { _mm_setcsr(static_cast<unsigned>(value)); }
#elif defined(__aarch64__)
constexpr unsigned long long kStandardControl = 0;
constexpr unsigned long long kControlMask = ~0ULL;
unsigned long long read_control() {
  unsigned long long value;
  __asm__ volatile("mrs %0, fpcr" : "=r"(value));
  return value;
}
void write_control(unsigned long long value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
#else
constexpr unsigned long long kStandardControl = 0;
constexpr unsigned long long kControlMask = 0;
unsigned long long read_control() { return 0; }
void write_control(unsigned long long) {}
#endif

#if defined(__x86_64__)
// Not every compiler knows "f16c" as an argument of __builtin_cpu_supports.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace

const char* isa_name(Isa isa) {
  static constexpr const char* kNames[] = {"plain", "avx2", "avx512"};
  return name_in(kNames, isa, "plain");
}

bool cpu_supports(Isa isa) {
  if (isa == Isa::kPlain) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  static const bool f16c = has_f16c();  // asked once: a virtual machine takes microseconds to answer
  const bool avx2 = __builtin_cpu_supports("avx2") && f16c;
  return isa == Isa::kAvx2 ? avx2 : avx2 && has_avx512();
#else
  return false;
#endif
}

StandardFloatMode::StandardFloatMode() : saved_(read_control()) {
  if ((saved_ & kControlMask) == kStandardControl) return;
  write_control(kStandardControl);
  changed_ = true;
}

StandardFloatMode::~StandardFloatMode() {
  if (changed_) write_control(saved_);
}

}  // namespace multiring
