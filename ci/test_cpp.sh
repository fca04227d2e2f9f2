#!/usr/bin/env bash
# Builds and runs the C++ tests.
#   ci/test_cpp.sh              of the library that is installed in .venv
#   ci/test_cpp.sh address      the same tests, of a library that is compiled with the sanitizers of addresses and of
#                               undefined behaviour; the tests themselves need not be
#   ci/test_cpp.sh thread       of a library with the thread sanitizer, which has to see the tests as well
#   ci/test_cpp.sh compile      compiles what the first two need, before the library is installed
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-installed}
tests=build/cpp-tests
library=build/core-address
# At -O1, which compiles in half of the time.
instrumented=(-DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG")
mkdir -p build

build() {  # folder, target, options of cmake
  local folder=$1 target=$2
  shift 2
  { cmake -S . -B "$folder" -G Ninja "$@" && cmake --build "$folder" --parallel "$(nproc)" --target "$target"; } \
    >"$folder.log" 2>&1 || { tail -50 "$folder.log"; exit 1; }
}
build_tests() {  # target
  local installed
  installed=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/multiring/lib/libmultiring.so
  build "$tests" "$1" -DMULTIRING_BUILD_TESTS=ON -DCMAKE_BUILD_TYPE=Release -DMULTIRING_LIBRARY="$installed" \
    -DMULTIRING_SANITIZED_LIBRARY="$PWD/$library/core/libmultiring.so" -DMULTIRING_SANITIZERS=address,undefined
}
build_library() {
  build "$library" multiring "${instrumented[@]}" -DMULTIRING_SANITIZE=address,undefined
}
run() {  # folder, options of ctest; with SECOND_ATTEMPT=1 up to three tests that fail run once more, by themselves
  export TSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1
  # Tests wait for one another's ranks most of the time: with one for each processor, half of the time is idle.
  ctest --test-dir "$1" --output-on-failure --parallel $(( 2 * $(nproc) )) "${@:2}" && return
  [[ -n ${SECOND_ATTEMPT:-} ]] || return 1
  local failed
  failed=$(ctest --test-dir "$1" --rerun-failed --show-only | sed -n 's/^ *Test *#[0-9]*: /FLAKY /p')
  (( $(wc -l <<<"$failed") <= 3 )) && ctest --test-dir "$1" --output-on-failure --rerun-failed && echo "$failed"
}

case $mode in
  compile) build_tests test_objects; build_library ;;
  installed) build_tests all; run "$tests" --label-exclude sanitized ;;
  address) build_library; build_tests sanitized_tests; run "$tests" --label-regex sanitized ;;
  thread)
    # Each file compiled by itself shows an #include that is missing.
    build "$tests-thread" all -DMULTIRING_BUILD_TESTS=ON "${instrumented[@]}" -DMULTIRING_SANITIZE=thread -DMULTIRING_UNITY=OFF
    run "$tests-thread"
    ;;
  *) sed -n '2,7s/^# *//p' "$0"; exit 2 ;;
esac
