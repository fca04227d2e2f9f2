#!/usr/bin/env bash
# Runs a command as a step of `make test` and says how long it took:  ci/step.sh NAME COMMAND...
name=$1
shift
"$@"
code=$?
echo "step: $name: $SECONDS s$([ $code = 0 ] || echo ", failed with exit code $code")"
exit $code
