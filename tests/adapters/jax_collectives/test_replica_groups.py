"""The groups of devices in the text of a compiled program, against what XLA documents."""

from __future__ import annotations

import runpy

import numpy as np
import pytest

from multiring.errors import UsageError
from tests.support import REPOSITORY

# Not imported: the package sets variables for JAX.
MODULE = runpy.run_path(str(REPOSITORY / "integrations/jax_collectives/replica_groups.py"))
communicating_devices = MODULE["communicating_devices"]

FLAT = "channel_id=1, replica_groups={}, use_global_device_ids=true, to_apply=%add"
FOUR = np.array([[0, 2048, 4096, 6144]])


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{}", (0, 2048, 4096, 6144)),
        ("{{0,1,2,3}}", (0, 2048, 4096, 6144)),
        ("{{3,1},{0,2}}", (0, 4096)),
        ("{{0,2},{3,1}}", (0, 4096)),
        ("[2,2]<=[4]", (0, 2048)),
        ("[2,2]<=[2,2]T(1,0)", (0, 4096)),
        ("[1,4]<=[2,2]T(1,0)", (0, 4096, 2048, 6144)),
        ("{{1,2},{3}}", None),
        ("mesh['axis_0'=4] {'axis_0'}", (0, 2048, 4096, 6144)),
        ("mesh['x'=2,'y'=2] {'x'}", (0, 4096)),
        ("mesh['x'=2,'y'=2] {'y'}", (0, 2048)),
        ("mesh['x'=2,'y'=2] {'y','x'}", (0, 4096, 2048, 6144)),
        ("mesh['x'=2,'y'=2] {}", (0,)),
        ("mesh['x'=4,'y'=1] {'x':(1)2}", (0, 4096)),
        ("mesh['x'=4] {'x':(2)2}", (0, 2048)),
        ("mesh['x'=4] {'x':(2)2,'x':(1)2}", (0, 4096, 2048, 6144)),
        ("mesh['x'=2,'y'=2], device_ids=([[3,1],[0,2]]) {'y'}", (0, 4096)),
        ("mesh['x'=2,'y'=2], device_ids=([2,2]<=[2,2]T(1,0)) {'y'}", (0, 4096)),
    ],
)
def test_groups_of_an_allreduce(groups: str, expected: tuple[int, ...] | None) -> None:
    line = "  %s = f32[2] all-reduce(%p), " + FLAT.replace("={}", f"={groups}")
    found = communicating_devices(f"HloModule jit_f\n{line}\n{line}", FOUR, 0)
    assert found == [expected or ()]


def test_what_the_numbers_count() -> None:
    # Two replicas of three partitions each.
    devices = np.arange(6).reshape(2, 3)
    lines = {
        "all-reduce(%p), replica_groups={{0,1}}": (1, 4),
        "all-reduce(%p), channel_id=1, replica_groups={{0,1}}": (0, 1, 2, 3, 4, 5),
        "all-reduce(%p), channel_id=1, replica_groups={{0},{1}}": (3, 4, 5),
        "all-to-all(%p), channel_id=1, replica_groups={{0,1},{2}}": (3, 4),
        "collective-permute(%p), channel_id=1, source_target_pairs={{0,1}}": (3, 4, 5),
        "collective-permute-start(%p), source_target_pairs={{0,1}}": (1, 4),
        "all-gather(%p), channel_id=1, replica_groups={{5,4,3},{0,1,2}}, use_global_device_ids=true": (
            5,
            4,
            3,
        ),
    }
    for line, expected in lines.items():
        assert communicating_devices(f"  %x = f32[2] {line}", devices, 4) == [expected], line
    assert communicating_devices("%x = f32[2] add(%a, %b)", devices, 4) == []


def test_groups_in_an_unknown_form_are_refused() -> None:
    with pytest.raises(UsageError, match="names groups of devices"):
        communicating_devices("%s = all-reduce(%p), channel_id=1, replica_groups=@mesh<x=2>{x}", FOUR, 0)
