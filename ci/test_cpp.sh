#!/usr/bin/env bash
# Builds and runs the C++ tests.
#   ci/test_cpp.sh              of the library that is installed in .venv
#   ci/test_cpp.sh compile      compiles them for that, before it is there
#   ci/test_cpp.sh SANITIZERS   of a library of their own, for example ci/test_cpp.sh address,undefined
set -euo pipefail
cd "$(dirname "$0")/.."
build=build/cpp-tests
options=(-DMULTIRING_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=Release)
if [[ ${1:-compile} == compile ]]; then
  options+=(-DMULTIRING_LIBRARY="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/multiring/lib/libmultiring.so")
else
  build+=-${1//,/-}
  # At -O1, which compiles in half of the time.
  options+=(-DMULTIRING_SANITIZE="$1" -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG")
  # One of them compiles each file by itself, which shows an #include that is missing.
  [[ $1 != thread ]] || options+=(-DMULTIRING_UNITY=OFF)
fi
targets=()
[[ ${1:-} != compile ]] || targets=(--target test_objects)
log=$build.log
mkdir -p build
{ cmake -S . -B "$build" -G Ninja "${options[@]}" && cmake --build "$build" --parallel "$(nproc)" "${targets[@]}"; } \
  >"$log" 2>&1 || { tail -50 "$log"; exit 1; }
[[ ${1:-} != compile ]] || exit 0
export TSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1
ctest --test-dir "$build" --output-on-failure --parallel "$(nproc)"
