"""Starting ranks on emulated hosts: by a command in place of ssh, by a real sshd, by mpirun, by srun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from multiring.benchmarks.emulation.hosts import EmulatedHosts
from tests.support import REPOSITORY, Job, wait_until

__all__ = ["RUN", "launch_on", "remote_pids", "script", "shell_of", "sshd_on", "started"]

RUN = [sys.executable, "-m", "multiring", "run"]
PORT = "2222"


def shell_of(hosts: EmulatedHosts) -> str:
    """What runs a command on a host as ssh does it, without encryption and users."""
    ids = ",".join(map(str, hosts.process_ids))
    return f"env EMULATED_HOSTS={ids} {sys.executable} -m multiring.benchmarks.emulation.start shell"


@contextmanager
def sshd_on(hosts: EmulatedHosts, directory: Path) -> Iterator[str]:
    """Runs OpenSSH's sshd on every host; what runs a command there. Skips where there is none."""
    unpacked = REPOSITORY / "build/openssh"  # by ci/fetch_sshd.sh
    path = f"{os.environ['PATH']}:{unpacked / 'usr/bin'}"
    sshd = shutil.which("sshd", path=f"/usr/sbin:{unpacked / 'usr/sbin'}")
    if sshd is None or shutil.which("ssh", path=path) is None:
        pytest.skip("openssh is not installed, and apt-get could not fetch it")
    libraries = [*unpacked.glob("usr/lib/*-linux-gnu"), *unpacked.glob("lib/*-linux-gnu")]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as daemons:
        patch.setenv("PATH", path)
        patch.setenv("LD_LIBRARY_PATH", ":".join(map(str, libraries)))
        yield _serve_ssh(hosts, sshd, directory, daemons)


def _with_user_for_sshd(directory: Path) -> list[str]:
    """The command that runs what follows with a user for sshd's unprivileged part, as packages make it."""
    users = Path("/etc/passwd").read_text()
    if "\nsshd:" not in users:
        users += "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"
    (directory / "passwd").write_text(users)
    mount = f'mount --bind {directory / "passwd"} /etc/passwd && exec "$0" "$@"'
    return ["unshare", "--mount", "sh", "-c", mount]


def _serve_ssh(hosts: EmulatedHosts, sshd: str, directory: Path, daemons: ExitStack) -> str:
    directory.mkdir()
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / key], check=True)
    shutil.copy(directory / "user.pub", directory / "authorized")
    options = {
        "Port": PORT,
        "HostKey": directory / "host",
        "AuthorizedKeysFile": directory / "authorized",
        "PermitRootLogin": "yes",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
    }
    Path("/run/sshd").mkdir(exist_ok=True)
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    for host in range(hosts.count):
        command = hosts.command(
            host, [*_with_user_for_sshd(directory), sshd, "-D", "-e", "-f", "/dev/null", *words]
        )
        with open(directory / f"log{host}", "wb") as log:
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        daemons.callback(daemon.wait)
        daemons.callback(daemon.terminate)
        wait_until(lambda host=host: "Server listening" in (directory / f"log{host}").read_text(), "sshd")
    return (
        f"ssh -F none -p {PORT} -i {directory / 'user'} -o StrictHostKeyChecking=no -o BatchMode=yes "
        "-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    )


def launch_on(places: str, hosts: EmulatedHosts, ssh: str, *words: str) -> Job:
    """`multiring run` on the first host, with ranks on those of `places`."""
    return started(hosts.command(0, [*RUN, "-H", places, "--ssh", ssh]), words)


def started(command: Sequence[str], words: Sequence[str], environ: Mapping[str, str] | None = None) -> Job:
    """A job of `multiring run` with more words, whose ranks know its directory."""
    return Job(
        lambda root: [*command, "--env", f"TEST_DIRECTORY={root / 'd'}", *words], environ, cwd=REPOSITORY
    )


def script(text: str, tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


def remote_pids(marker: str) -> list[int]:
    """Processes with `marker` in their command line, the launcher's and ssh's own excepted."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if marker.encode() in words and b"run" not in words:
            found.append(int(path.parent.name))
    return found
