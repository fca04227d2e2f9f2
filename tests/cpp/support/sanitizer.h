#pragma once

#include <vector>

// Of the runtime of any sanitizer; null without one.
extern "C" void __sanitizer_set_report_path(const char* path) __attribute__((weak));

namespace multiring::testing {

/// Whether this process runs under a sanitizer. The library may be compiled with one where the tests are not.
inline bool sanitized() { return &__sanitizer_set_report_path != nullptr; }

/// How much longer things take under a sanitizer, for limits of time.
inline const double kSlowness = sanitized() ? 10.0 : 1.0;

/// All of `some` and `more`; under a sanitizer `some` alone, which meet every line that the others meet: the
/// results of all are compared without it.
template <typename T>
std::vector<T> fewer_if_sanitized(std::vector<T> some, const std::vector<T>& more) {
  if (!sanitized()) some.insert(some.end(), more.begin(), more.end());
  return some;
}

}  // namespace multiring::testing
