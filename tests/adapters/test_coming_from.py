"""The pages for those who come from DDP and from Horovod: their scripts run, and what they state is so."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support import REPOSITORY, run_job

RESULTS = """
held = {name: value.double().sum().item() for name, value in model.state_dict().items()}
everyone = comm.allgather_object(held)
assert everyone == [everyone[0]] * comm.size, everyone
print("the ranks agree")
"""


@pytest.mark.parametrize("page", ["coming-from-ddp", "coming-from-horovod"])
def test_the_script_of_the_page(page: str, tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / f"{page}.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    done = run_job(3, block + RESULTS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the ranks agree") == 3


def test_the_variables_of_torchrun_are_set() -> None:
    names = ("MULTIRING_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    script = f"import os\nprint([os.environ.get(name) for name in {names}])\n"
    env = {name: value for name, value in os.environ.items() if name in ("PATH",)}
    done = run_job(2, script, env=env)
    lines = sorted(done.stdout.splitlines())
    assert lines == ["[0] ['0', '0', '2', '0']", "[1] ['1', '1', '2', '1']"], done.stderr
