"""Copies from and to a device have to wait for all that they wait for: on the stand-in for the driver."""

from __future__ import annotations

import itertools

import numpy as np

from multiring import Communicator, _core
from multiring.errors import InternalError
from tests.gpu import fake_arrays
from tests.on_ranks import on_ranks

# Memory that is used again must not hold the right ones already.
_values = itertools.count(7)


def _there_and_back(seed: int) -> bool:
    """What the adapters call for gradients that the host works on."""
    fake_arrays.configure(f"progress=seeded seed={seed}")
    value = next(_values)
    with fake_arrays.stream() as stream:
        x = fake_arrays.full(1000, 0)
        x += value
        found = _core.copy_from_device(x.address, 4000, 0, stream).view(np.float32)
        x += 1  # still to come when the array is written
        _core.copy_to_device(x.address, (found * 2).view(np.uint8), 0, stream)
        x += 1
        return bool((found == value).all() and (x.get() == 2 * value + 1).all())


def _is_noticed(ignored: str, seed: int) -> bool:
    fake_arrays.configure(f"recover ignore={ignored}")
    try:
        is_right = _there_and_back(seed)
    except InternalError:  # the array was freed when a copy was still to come
        is_right = False
    fake_arrays.configure("recover ignore=wait:-1 ignore=record:-1")
    assert _there_and_back(seed), f"seed {seed} with all of them"
    return not is_right


@on_ranks(1)
def test_fake_copies_need_every_wait_and_every_event(comm: Communicator) -> None:
    orderings = fake_arrays.driver().fake_cuda_orderings
    try:
        before = [orderings(kind) for kind in (0, 1)]
        assert _there_and_back(0)
        counted = [orderings(kind) - before[kind] for kind in (0, 1)]
        assert min(counted) > 1
        for kind, name in enumerate(("wait", "record")):
            for number in range(counted[kind]):
                assert any(_is_noticed(f"{name}:{number}", seed) for seed in range(100)), f"{name} {number}"
    finally:
        fake_arrays.configure("recover progress=late ignore=wait:-1 ignore=record:-1")
