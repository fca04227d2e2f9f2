"""torch's own tests of its backends, which its wheel has, over ours: those that Gloo runs without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import Job

pytest.importorskip("expecttest", reason="torch's tests need it")

# As torch's test/distributed/test_distributed_spawn.py, but for forked ranks, which import nothing anew. The
# tests ask for Gloo, whose cases they run then; it is ours that is made.
SUITE = """
import os, sys, unittest
os.environ.update(BACKEND="gloo", WORLD_SIZE="3", TEMP_DIR=os.environ["TEST_DIRECTORY"])
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import distributed_test

from multiring.torch_distributed import ProcessGroup, as_gloo

class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def run_test(self, *args):
        assert isinstance(dist.group.WORLD, ProcessGroup)
        super().run_test(*args)

# What Gloo alone does: its events in torch's profiler, the texts of its errors, its name in what DDP logs.
distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()
other = {"ddp_logging_data_cpu", "monitored_barrier_gloo", "monitored_barrier_gloo_subgroup",
         "monitored_barrier_gloo_rank_0_timeout"}
names = [name for name in unittest.TestLoader().getTestCaseNames(Suite) if name[5:] not in other]
part, parts = map(int, sys.argv[1:])
as_gloo()
suite = unittest.TestSuite(map(Suite, names[part::parts]))
result = unittest.TextTestRunner(verbosity=0).run(suite)
print(f"ran {result.testsRun - len(result.skipped)}", flush=True)
sys.exit(not result.wasSuccessful())
"""
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_suite_of_torch(tmp_path: Path, part: int) -> None:
    script = tmp_path / "suite.py"
    script.write_text(SUITE)
    done = Job([sys.executable, str(script), str(part), str(PARTS)]).run(300.0, 0)
    count = int(done.stdout.split("ran ")[-1])
    assert count >= 15, done.stderr[-2000:]
