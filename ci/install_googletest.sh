#!/usr/bin/env bash
# Installs GoogleTest, which the C++ tests build on, from the distribution if it is not there.
set -euo pipefail
[ -e /usr/src/googletest/CMakeLists.txt ] && exit 0
echo 'int main() {}' | ${CXX:-g++} -x c++ -include gtest/gtest.h - -fsyntax-only 2>/dev/null && exit 0
as_root=()
if [ "$(id -u)" != 0 ]; then
  as_root=(sudo -n)
  sudo -n true 2>/dev/null || { echo "The C++ tests need GoogleTest: sudo apt-get install libgtest-dev" >&2; exit 1; }
fi
command -v apt-get >/dev/null || { echo "The C++ tests need GoogleTest: install it with your package manager" >&2; exit 1; }
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq libgtest-dev
