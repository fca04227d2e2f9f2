"""What process groups and Horovod's functions do with CUDA tensors, with none."""

from __future__ import annotations

from tests.gpu import stand_in
from tests.support import run_job

SCRIPT = """
from tests.gpu.pretended_device import main
main()
"""


def test_branches_for_devices_with_tensors_of_the_cpu() -> None:
    ended = run_job(3, SCRIPT, env={"PYTHONPATH": stand_in.python_path()})
    told = [line.split("SAME ")[1] for line in ended.stdout.splitlines() if "SAME" in line]
    assert sorted(told) == ["0 True", "1 True", "2 True"], ended.stdout + ended.stderr
