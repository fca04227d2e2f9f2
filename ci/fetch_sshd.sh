#!/usr/bin/env bash
# Unpacks an sshd into build/ for the tests of `multiring run -H`, where there is none: to install one would start
# it. Where that is not possible, those tests are skipped and say so.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x /usr/sbin/sshd ] || [ -x build/openssh/usr/sbin/sshd ] && exit 0
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || exit 0
mkdir -p build/openssh/packages
cd build/openssh/packages
apt-get download -qq openssh-server openssh-client libwrap0 libfido2-1 libcbor0.8 libedit2 2>/dev/null || exit 0
for package in *.deb; do dpkg-deb -x "$package" ..; done
