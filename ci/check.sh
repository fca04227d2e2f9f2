#!/usr/bin/env bash
# Everything that is checked without running the product: style, types, layers, words.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
ruff check .
ruff format --check .
git ls-files '*.h' '*.cpp' '*.inc' | xargs clang-format --dry-run --Werror
ci/check_types.sh
python ci/check_layers.py
python ci/check_words.py
python ci/check_test_imports.py
