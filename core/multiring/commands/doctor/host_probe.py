"""What `multiring doctor -H` runs on each host: it tells what the host is like, as one line of JSON.

The line begins with a mark, so that what a shell prints on its start is not taken for it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from multiring import machine
from multiring.commands.doctor.checks import Status, run_checks
from multiring.commands.env import versions
from multiring.errors import MultiringError

__all__ = ["MARK", "MODULE", "longer", "look", "machine_id", "main", "marked"]

MARK = "multiring-doctor "
MODULE = "multiring.commands.doctor.host_probe"

# The first is about one host alone, the others are told for each host in another way.
_NOT_HERE = ("self-test", "processors", "launcher")

# All are asked at once, and perhaps load from one file server: so many more hosts may take as long again.
_HOSTS_IN_TIME = 64


def longer(seconds: float, hosts: int) -> float:
    """How long something may take with so many hosts that takes `seconds` with one."""
    return seconds * (1 + hosts / _HOSTS_IN_TIME)


def look(directory: str, environ: dict[str, str]) -> dict[str, Any]:
    """What this host is like.

    Args:
        directory: Of the job.
        environ: Settings of the job.
    """
    os.environ.update(environ)
    found = {name: text for name, text in versions().items() if name != "native library"}
    addresses, problem = _addresses()
    findings = run_checks(without=_NOT_HERE)
    return {
        "machine": machine_id(),
        "versions": {**found, "python": platform.python_version()},
        "cores": machine.core_allowance(),
        "NUMA nodes": len(machine.numa_nodes()),
        "directory": os.path.isdir(directory) and os.access(directory, os.X_OK),
        "addresses": addresses,
        "no addresses": problem,
        "findings": [
            [name, finding.status.value, finding.detail, finding.fix]
            for name, finding in findings
            if finding.status is not Status.OK
        ],
    }


def _addresses() -> tuple[list[tuple[str, str, int]], str]:
    """Where ranks of this host would listen, or why nowhere."""
    try:
        from multiring import _core, config

        return _core.interface_addresses(config.load().interfaces), ""
    except (ImportError, MultiringError) as error:
        return [], str(error)


def machine_id() -> str:
    """The same for two names of what ranks take for one host."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


def marked(text: str) -> list[Any]:
    """What lines with the mark tell."""
    lines = text.splitlines()
    return [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]


def main() -> int:
    """Reads the arguments of `look`, and prints what it gives, with the clock before and after."""
    began = time.time()
    facts = look(**json.load(sys.stdin))
    print(f"\n{MARK}{json.dumps({**facts, 'clock': [began, time.time()]})}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
