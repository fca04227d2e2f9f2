"""Slurm as Debian has it, on emulated hosts: a munged and a slurmd on each, and slurmctld on the first.

Commands run on a host in a mount namespace of their own, in which hosts have names, and a directory of their
own where their munged is: one for all would take what two hosts read of it for a replay.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from multiring.benchmarks.emulation.hosts import EmulatedHosts
from multiring.commands.launcher.guardian import end_processes
from tests.support import REPOSITORY, wait_until

_UNPACKED = REPOSITORY / "build/slurm"  # by ci/fetch_slurm.sh
_SEARCH = f"{os.environ['PATH']}:/usr/sbin:{_UNPACKED / 'usr/sbin'}:{_UNPACKED / 'usr/bin'}"
_PLUGINS = "usr/lib/*-linux-gnu/slurm-wlm"

# No cgroups and no accounting, which need more of the machine than a test may ask. More processors than there
# may be, so that a node has room for several tasks.
_CONFIG = """
ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/here/munge.socket
CredType=cred/munge
{plugins}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
InactiveLimit=0
KillWait=3
MailProg=/bin/true
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=NO
"""


def _tool(name: str) -> str | None:
    """Debian calls daemons `slurmd-wlm` until it installs them."""
    return shutil.which(name, path=_SEARCH) or shutil.which(f"{name}-wlm", path=_SEARCH)


def why_not() -> str | None:
    """Why there can be no such cluster here; None: there can."""
    tools = ("munged", "slurmctld", "slurmd", "slurmstepd", "srun", "sbatch", "scontrol", "squeue", "scancel")
    if missing := [tool for tool in tools if _tool(tool) is None]:
        return f"{', '.join(missing)} of Slurm are not installed, and apt-get could not fetch them"
    return None


class SlurmCluster:
    """A cluster whose nodes are emulated hosts, of four processors each as far as Slurm is concerned. Its
    commands are to be run on the first host, with the variables `environ`."""

    def __init__(self, hosts: EmulatedHosts) -> None:
        self._hosts = hosts
        self._daemons = ExitStack()
        self._directory = Path(tempfile.mkdtemp(prefix="mrt-slurm-", dir="/tmp"))
        libraries = [*_UNPACKED.glob("usr/lib/*-linux-gnu"), *_UNPACKED.glob("lib/*-linux-gnu")]
        libraries += _UNPACKED.glob(_PLUGINS)
        self.environ = {"PATH": _SEARCH, "SLURM_CONF": str(self._directory / "slurm.conf")}
        if libraries:
            self.environ["LD_LIBRARY_PATH"] = ":".join(map(str, libraries))

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a host, where it needs `environ`."""
        own, here, names = (self._directory / name for name in (f"host{host}", "here", "names"))
        mounts = f'mount --bind {own} {here} && mount --bind {names} /etc/hosts && exec "$0" "$@"'
        return self._hosts.command(host, ["unshare", "--mount", "sh", "-c", mounts, *command])

    def run(self, *command: str) -> str:
        """What a command says on the first host."""
        done = subprocess.run(
            self.command(0, command),
            env={**os.environ, **self.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self._logs()}"
        return done.stdout

    def _logs(self) -> str:
        """The end of what the daemons have written."""
        logs = self._directory.glob("*.log")
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in logs)

    def _start(self) -> None:
        plugins = next(_UNPACKED.glob(_PLUGINS), None)
        places = [(self._hosts.name(host), self._hosts.address(host)) for host in range(self._hosts.count)]
        (self._directory / "slurm.conf").write_text(
            _CONFIG.format(
                controller=self._hosts.name(0),
                address=self._hosts.address(0),
                directory=self._directory,
                plugins="" if plugins is None else f"PluginDir={plugins}",
                nodes="\n".join(f"NodeName={name} NodeAddr={address} CPUs=4" for name, address in places),
            )
        )
        names = [f"{address} {name}" for name, address in places]
        (self._directory / "names").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        (self._directory / "here").mkdir()
        key = self._directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        for host in range(self._hosts.count):
            own = self._directory / f"host{host}"
            own.mkdir()
            here = f"{self._directory}/here/munge"
            files = [f"--log-file={here}.log", f"--pid-file={here}.pid", f"--socket={here}.socket"]
            files += [f"--key-file={key}", f"--seed-file={own}/seed"]
            self._daemon(host, "munged", ["--foreground", "--force", *files])
            wait_until((own / "munge.socket").exists, "munged")
        self._daemon(0, "slurmctld", ["-D"])
        stepd = _tool("slurmstepd")
        assert stepd is not None
        for host in range(self._hosts.count):
            self._daemon(host, "slurmd", ["-D", "-N", self._hosts.name(host), "-d", stepd])
        wait_until(self._is_up, "nodes that are idle")

    def _daemon(self, host: int, name: str, arguments: Sequence[str]) -> None:
        program = _tool(name)
        assert program is not None
        with open(self._directory / f"{name}{host}.log", "wb") as log:
            daemon = subprocess.Popen(
                self.command(host, [program, *arguments]),
                env={**os.environ, **self.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._daemons.callback(daemon.wait)
        self._daemons.callback(daemon.terminate)

    def _is_up(self) -> bool:
        with contextlib.suppress(AssertionError):  # slurmctld does not listen yet
            return self.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * self._hosts.count
        return False

    def _close(self) -> None:
        self._daemons.close()
        # Steps outlive slurmd; after a test that failed there may be some.
        end_processes(f"SLURM_CONF={self.environ['SLURM_CONF']}".encode(), set())
        shutil.rmtree(self._directory, ignore_errors=True)
