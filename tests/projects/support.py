"""How programs of other projects are run: unchanged, over multiring and over what they have without it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support import REPOSITORY, Job

ENVIRONMENT = REPOSITORY / "build" / "projects"
PROGRAMS = Path(__file__).parent / "programs"
# `import horovod` by the one file that the wheel multiring-horovod installs.
HOROVOD = {"PYTHONPATH": str(REPOSITORY / "integrations" / "horovod" / "shim")}
# In the table, for what only Horovod itself could be compared with.
NO_HOROVOD = "no Horovod builds for these versions"
AS_GLOO = {"MULTIRING_AS_GLOO": "1"}

needs_projects = pytest.mark.skipif(
    not (ENVIRONMENT / ".made").exists(), reason="ci/make_projects_environment.sh installs the projects"
)


def python(*words: object) -> list[str]:
    """Return a command of the Python that has the projects."""
    return [str(ENVIRONMENT / "bin" / "python"), *map(str, words)]


def launched(ranks: int, *words: object) -> list[str]:
    """Return the command that starts so many ranks, with options of `multiring run` before the program."""
    return python("-m", "multiring", "run", "-np", ranks, *words)


def by_torchrun(ranks: int, *words: object) -> list[str]:
    """Return the command that starts so many ranks without multiring."""
    return python("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words)


def done(
    command: list[str], environment: Mapping[str, str] | None = None, timeout: float = 240.0
) -> CompletedProcess[str]:
    """Run a command to its end, which has to be a good one."""
    path = f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return Job(command, {"PATH": path, **(environment or {})}).run(timeout, 0)


def record(project: str, by: str, what: str, ours: str, theirs: str) -> None:
    """Leave a row of the table in docs/compatibility.md, which ci/update_compatibility.py writes.

    Args:
        project: Name of the distribution, whose version stands in ci/projects.txt or ci/constraints.txt.
        by: How the project reaches multiring.
        what: What was run.
        ours: What came out over multiring.
        theirs: What came out over what the project uses without multiring.
    """
    row = {"project": project, "by": by, "what": what, "ours": ours, "theirs": theirs}
    name = re.sub(r"\W+", "-", f"{project} {by}").strip("-")
    (ENVIRONMENT / f"{name}.json").write_text(json.dumps(row))
