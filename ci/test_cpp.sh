#!/usr/bin/env bash
# Builds and runs the C++ tests: ci/test_cpp.sh [sanitizers], for example ci/test_cpp.sh thread
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizers=${1:-}
build=build/cpp-tests${sanitizers:+-${sanitizers//,/-}}
# As it is shipped. For addresses -O1 compiles in half of the time; threads would take too long to run.
flags=-O3
[[ $sanitizers != address* ]] || flags=-O1
mkdir -p build
cmake -S . -B "$build" -G Ninja -DMULTIRING_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=Release -DMULTIRING_SANITIZE="$sanitizers" -DCMAKE_CXX_FLAGS_RELEASE="$flags -DNDEBUG" >"$build.log" 2>&1 ||
  { cat "$build.log"; exit 1; }
cmake --build "$build" --parallel "$(nproc)" >"$build.log" 2>&1 || { tail -50 "$build.log"; exit 1; }
export TSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1
ctest --test-dir "$build" --output-on-failure --parallel "$(nproc)"
