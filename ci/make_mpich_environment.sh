#!/usr/bin/env bash
# Makes a Python environment with MPICH in build/mpich for the tests of multiring over MPI: the wheels of Open MPI and
# MPICH bring the same commands, so they cannot be in one. It sees everything else of the environment that is given:
# ci/make_mpich_environment.sh [python]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
environment=build/mpich
[ -e "$environment/.made" ] && exit 0
mkdir -p build
rm -rf "$environment"
"$python" -m venv --without-pip "$environment"
"$python" -m pip --python "$environment" install --quiet --no-deps -c ci/constraints.txt mpich mpi4py
own=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"), "import _editable_skbc_multiring", sep="\n")' \
  >"$own/packages.pth"
touch "$environment/.made"
