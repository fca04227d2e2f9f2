"""Orbax over multiring: what two ranks have saved, two ranks and one process read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import Job, run_job

pytest.importorskip("orbax.checkpoint", reason="Orbax comes with Flax, an optional dependency")

PROGRAM = """
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

folder, what = sys.argv[1:]
if what != "alone":
    jax.distributed.initialize()
import orbax.checkpoint as ocp

mesh = Mesh(np.array(jax.devices()), ("x",))


def made(array, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


values = {"weights": np.arange(24.0, dtype=np.float32).reshape(8, 3), "step": np.int32(7)}
state = {"weights": made(values["weights"], "x"), "step": made(values["step"])}
with ocp.CheckpointManager(folder) as manager:
    if what == "save":
        manager.save(3, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    found = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))
for name, array in found.items():
    assert array.sharding == state[name].sharding
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[name][shard.index])
print(f"sum {float(jax.jit(lambda found: found['weights'].sum() + found['step'])(found))}")
"""


def test_what_ranks_save_ranks_and_one_process_restore(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    saved = run_job(2, PROGRAM, folder, "save", launcher_args=["--jax"], timeout=120, code=0)
    restored = run_job(2, PROGRAM, folder, "restore", launcher_args=["--jax"], timeout=120, code=0)
    (tmp_path / "program.py").write_text(PROGRAM)
    alone = Job([sys.executable, str(tmp_path / "program.py"), folder, "alone"]).run(120, 0)
    assert saved.stdout.count("sum 283.0") == restored.stdout.count("sum 283.0") == 2
    assert alone.stdout.count("sum 283.0") == 1
