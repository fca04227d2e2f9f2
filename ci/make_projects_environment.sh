#!/usr/bin/env bash
# Makes a Python environment in build/projects with the projects of others that tests/projects runs, and fetches the tests of
# one that has them in its source distribution. It sees everything else of the environment that is given. The release of
# JAX before that environment's is put into the folder `previous-jax`.
# ci/make_projects_environment.sh [python]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
environment=build/projects
previous_jax=0.10.1
wanted() { cat ci/projects.txt ci/make_projects_environment.sh; }
[ -e "$environment/.made" ] && cmp -s <(wanted) "$environment/.made" && exit 0
mkdir -p build
rm -rf "$environment"
"$python" -m venv --without-pip "$environment"
"$python" -m pip --python "$environment" install --quiet --no-deps -r ci/projects.txt
own=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(f"import site; site.addsitedir({sysconfig.get_path('"'purelib'"')!r})")' >"$own/packages.pth"
"$python" -m pip download --quiet --no-deps --no-binary :all: -c ci/constraints.txt --dest "$environment" pytorch-ignite
tar -xzf "$environment"/pytorch_ignite-*.tar.gz -C "$environment"
"$python" -m pip install --quiet --no-deps --target "$environment/previous-jax" "jax==$previous_jax" "jaxlib==$previous_jax"
wanted >"$environment/.made"
