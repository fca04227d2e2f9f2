#pragma once

#include <cstdio>
#include <cstdlib>

/// Ends the process if `condition` does not hold, in every kind of build.
#define MULTIRING_REQUIRE(condition)                                                 \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: required: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                  \
    }                                                                                \
  } while (false)
