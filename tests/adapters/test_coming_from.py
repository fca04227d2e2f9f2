"""The pages for those who come from DDP and from Horovod: their scripts run, and what they state is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import REPOSITORY, run_job

RESULTS = """
held = {name: value.double().sum().item() for name, value in model.state_dict().items()}
everyone = comm.allgather_object(held)
assert everyone == [everyone[0]] * comm.size, everyone
"""


@pytest.mark.parametrize("page", ["coming-from-ddp", "coming-from-horovod"])
def test_the_script_of_the_page(page: str, tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / f"{page}.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    run_job(3, block + RESULTS, cwd=tmp_path, code=0)
