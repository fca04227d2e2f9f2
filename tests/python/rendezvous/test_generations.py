"""What initialisation after initialisation leaves behind."""

from __future__ import annotations

import subprocess
import sys

from tests.support import run_job

PROGRAM = """
import os, multiring
for _ in range(20):
    comm = multiring.init()
    comm.barrier()
    print("files:", sorted(os.listdir(os.environ["MULTIRING_STORE"].removeprefix("file://"))))
    comm.barrier()
    multiring.shutdown()
"""


def test_keys_go_when_all_ranks_are_connected() -> None:
    done = run_job(3, PROGRAM)
    lines = [line for line in done.stdout.splitlines() if "files:" in line]
    assert len(lines) == 60
    assert not [line for line in lines if "generation" in line], lines[-1]


def test_the_version_is_looked_up_when_it_is_asked_for() -> None:
    program = (
        "import sys, multiring\n"
        "assert 'numpy' not in sys.modules and 'multiring.version' not in sys.modules\n"
        "assert multiring.__version__ == multiring.version.__version__\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
