#!/usr/bin/env bash
# Everything that a machine with a GPU can show: tests/gpu, and the figures of benchmarks/devices.py and of
# `multiring bench allreduce --device cuda`, beside NCCL and Gloo.
#   ci/gpu.sh [FOLDER]    results go to FOLDER (default: build/gpu)
# Takes the python3 of the machine (PYTHON: another one) with PyTorch or CuPy, pytest, scikit-build-core, pybind11,
# CMake and ninja, and no network. What it builds goes to a temporary folder. Without a GPU it says so, and is done.
# GPU_TESTS are further arguments of pytest, GPU_BENCHMARK those of the first measurement (0: neither), GPU_RANKS
# the numbers of ranks of both.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
results=$(realpath -m "${1:-build/gpu}")
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "skipped: nvidia-smi finds no GPU"
  exit 0
fi
nvidia-smi -L
mkdir -p "$results"
target=$(mktemp -d)
trap 'rm -rf "$target"' EXIT
began=$SECONDS
"$python" -m pip install --quiet --no-build-isolation --no-deps --no-compile --target "$target" . \
  >"$results/build.log" 2>&1 || { tail -50 "$results/build.log"; exit 1; }
echo "built in $((SECONDS - began)) s"
export PYTHONPATH="$target${PYTHONPATH:+:$PYTHONPATH}" PATH="$target/bin:$PATH"

status=0
"$python" -m pytest tests/gpu -q -rs --durations=5 -p no:cacheprovider ${GPU_TESTS:-} 2>&1 |
  tee "$results/tests.log" || status=1
echo "tested after $((SECONDS - began)) s"
if [[ ${GPU_BENCHMARK:-1} != 0 ]]; then
  for ranks in ${GPU_RANKS:-1 2 4}; do
    "$python" -m multiring run -np "$ranks" benchmarks/devices.py --json "$results/allreduce-$ranks-ranks.json" \
      ${GPU_BENCHMARK:-} 2>&1 |
      tee "$results/allreduce-$ranks-ranks.log" || status=1
    "$python" -m multiring bench allreduce --device cuda -np "$ranks" --format markdown --seconds 0.3 \
      --sizes 4,4KiB,64KiB,1MiB,16MiB,64MiB,256MiB --json "$results/beside-$ranks-ranks.json" 2>&1 |
      tee "$results/beside-$ranks-ranks.log" || status=1
  done
fi
echo "done after $((SECONDS - began)) s; results in $results"
exit "$status"
