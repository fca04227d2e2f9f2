#!/bin/sh
# Runs a command that compiles the native library, and tells every 15 seconds how many of its files are compiled.
#
# ci/compile_progress.sh pip install ...
set -u
cd "$(dirname "$0")/.."
began=$(mktemp)
trap 'rm -f "$began"' EXIT
start=$(date +%s)
"$@" &
command=$!
trap 'kill "$command" 2>/dev/null' INT TERM
seconds=0
while kill -0 "$command" 2>/dev/null; do
  sleep 1
  seconds=$((seconds + 1))
  if [ $((seconds % 15)) -eq 0 ]; then
    compiled=$(find build/cp3* -name '*.o' -newer "$began" 2>/dev/null | wc -l)
    total=$(cat build/cp3*/build.ninja 2>/dev/null | grep -c '^build .*\.o:')
    left=''
    passed=$(($(date +%s) - start))
    if [ "$compiled" -gt 5 ] && [ "$compiled" -lt "$total" ]; then
      left=", about $((passed * (total - compiled) / compiled)) s left"
    fi
    echo "compiling the native library: $compiled of $total files after $passed s$left"
  fi
done
wait "$command"
