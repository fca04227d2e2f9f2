#!/usr/bin/env bash
# Unpacks Slurm and MUNGE into build/ for the tests of jobs under Slurm, where there is none: to install them would
# start them. Where that is not possible, those tests are skipped and say so.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null && exit 0
[ -e build/slurm/unpacked ] && exit 0
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || exit 0
mkdir -p build/slurm/packages
cd build/slurm/packages
# Of the libraries those that a plain Debian does not have.
apt-get download -qq slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 libhwloc15 liblua5.1-0 \
    libjson-c5 libyaml-0-2 libnuma1 libdbus-1-3 liblz4-1 2>/dev/null || exit 0
for package in *.deb; do dpkg-deb -x "$package" ..; done
touch ../unpacked
