#pragma once

#include <utility>

#include "device/kernels/reduce.inc"

namespace multiring::testing {

inline constexpr int kKernelDTypes = 13;

/// What a device does with the kernel that is compiled for a dtype, by its number; in so many threads.
inline void reduce_on_host(int dtype, const peer::ReduceJob& job) {
  const auto run = [&]<int... each>(std::integer_sequence<int, each...>) {
    constexpr unsigned kThreads = 7;
    for (unsigned thread = 0; thread < kThreads; ++thread)
      ((each == dtype ? peer::reduce<each>(job, thread, kThreads) : void()), ...);
  };
  run(std::make_integer_sequence<int, kKernelDTypes>{});
}

}  // namespace multiring::testing
