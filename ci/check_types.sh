#!/usr/bin/env bash
# mypy (strict) over the package as it is installed: the folders that pyproject.toml maps into it, laid together.
set -euo pipefail
cd "$(dirname "$0")/.."
tree=build/types
rm -rf "$tree"
mkdir -p "$tree/multiring"
ln -s "$PWD"/core/multiring/* "$tree/multiring/"
for folder in adapters/*/ integrations/*/; do ln -s "$PWD/$folder" "$tree/multiring/$(basename "$folder")"; done
for folder in models benchmarks; do ln -s "$PWD/$folder" "$tree/multiring/$folder"; done
MYPYPATH=$tree mypy --config-file pyproject.toml -p multiring
