#!/usr/bin/env bash
# Runs pytest with the given options. With SECOND_ATTEMPT=1 up to three tests that fail run once more, by themselves.
set -uo pipefail
cd "$(dirname "$0")/.."
rm -f .pytest_cache/v/cache/lastfailed
.venv/bin/pytest "$@"
code=$?
[[ $code == 1 && -n ${SECOND_ATTEMPT:-} ]] || exit $code
exec .venv/bin/python - <<'END'
import json, pathlib, subprocess, sys

failed = list(json.loads(pathlib.Path(".pytest_cache/v/cache/lastfailed").read_text()))
if len(failed) > 3 or subprocess.run([".venv/bin/pytest", *failed]).returncode:
    sys.exit(1)
print(*(f"FLAKY {name}" for name in failed), sep="\n")
END
