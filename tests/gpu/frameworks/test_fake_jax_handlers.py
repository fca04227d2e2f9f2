"""The handlers of multiring.jax for arrays on a device, called as XLA calls them (xla_program.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multiring import Communicator
from tests.gpu import fake_arrays, stand_in, xla_program
from tests.gpu.fake_arrays import Array
from tests.gpu.xla_program import HandlerError, Program
from tests.on_ranks import on_ranks
from tests.support import run_job

# Memory that is used again must not hold the right values already.
_values = itertools.count(7)


@contextmanager
def a_group(comm: Communicator) -> Iterator[Communicator]:
    """Ranks whose queue may break."""
    group = comm.split(0)
    assert group is not None
    try:
        yield group
    finally:
        fake_arrays.configure("recover progress=late")


def late(values: np.ndarray[Any, Any]) -> Array:
    """Has these values when the current stream has come so far, and zeros until then."""
    made = fake_arrays.array(np.zeros_like(values))
    source = fake_arrays.array(values)
    fake_arrays.copy(made, source)
    return made


def everything(comm: Communicator, program: Program, rows: int, base: int) -> None:
    """One of each kind, all under way at once, of values from `base` on."""
    rank, size = comm.rank, comm.size
    value = [np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) + base + r for r in range(size)]
    blocks = [np.array_split(each, size) for each in value]
    lengths = [len(block) for block in blocks[0]]
    total = np.sum(value, 0)
    cases = {
        "allreduce": (value[rank], rows, total),
        "broadcast": (value[rank], rows, value[size - 1]),
        "allgather": (blocks[rank][rank], rows, np.concatenate([blocks[r][r] for r in range(size)])),
        "reduce_scatter": (value[rank], lengths[rank], np.array_split(total, size)[rank]),
        "alltoall": (value[rank], lengths[rank] * size, np.concatenate([each[rank] for each in blocks])),
    }
    started = []
    for kind, (x, made, _) in cases.items():
        options: dict[str, Any] = {"root": size - 1} if kind == "broadcast" else {}
        if kind == "alltoall":
            options["splits"] = lengths
        started.append(program.start(kind, kind, [late(x)], made, **options))
    for call, (kind, (_, _, wanted)) in zip(started, cases.items(), strict=True):
        (y,) = program.done(call)
        # What the program does with the result is work of its stream, too.
        found = (y + 1).get()
        np.testing.assert_array_equal(found, wanted + 1, err_msg=f"{kind} {program.aliased}")


@on_ranks(2, 3)
def test_fake_collectives_in_many_orders(comm: Communicator) -> None:
    try:
        for seed in range(12):
            fake_arrays.configure(f"progress=seeded seed={seed * 3 + comm.rank}")
            with fake_arrays.stream() as stream:
                for aliased in (False, True):
                    everything(comm, Program(comm, stream, aliased=aliased), (7, 40_001)[seed % 2], 10 * seed)
        for progress in ("late", "threads"):
            fake_arrays.configure(f"progress={progress}")
            with fake_arrays.stream() as stream:
                everything(comm, Program(comm, stream), 3, 5)
        assert xla_program.library().multiring_jax_pending_calls() == 0
    finally:
        fake_arrays.configure("recover progress=late")


@on_ranks(3)
def test_fake_arrays_without_elements(comm: Communicator) -> None:
    """Of all ranks, and of some; beside others in one call."""
    with fake_arrays.stream() as stream:
        program = Program(comm, stream)
        mixed = [late(np.full((n, 3), comm.rank + 1, np.float32)) for n in (0, 5, 0)]
        found = program.done(program.start("allreduce", "mixed", mixed))
        assert [each.get().tolist() for each in found] == [[], [[6.0] * 3] * 5, []]
        mine = late(np.full((comm.rank, 2), comm.rank, np.float32))
        (rows,) = program.done(program.start("allgather", "some", [mine], 3))
        assert rows.get().tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        (block,) = program.done(
            program.start("reduce_scatter", "one", [late(np.ones((1, 2), np.float32))], int(comm.rank == 0))
        )
        assert block.get().tolist() == ([[3.0, 3.0]] if comm.rank == 0 else [])


def _alone(comm: Communicator, seed: int, kind: str) -> bool:
    """Whether a program of one rank sees what it has to."""
    fake_arrays.configure(f"progress=seeded seed={seed}")
    value = next(_values)
    with fake_arrays.stream() as stream:
        program = Program(comm, stream)
        x = late(np.full((1000, 1), value, np.float32))
        started = program.start(kind, "alone", [x], 1000, prescale=2.0)
        (y,) = program.done(started)
        return bool(((y + 1).get() == 2 * value + 1).all())


def _is_noticed(comm: Communicator, kind: str, ignored: str, seed: int) -> bool:
    fake_arrays.configure(f"recover ignore={ignored}")
    is_right = _alone(comm, seed, kind)
    fake_arrays.configure("recover ignore=wait:-1 ignore=record:-1")
    assert _alone(comm, seed, kind), f"seed {seed} with all of them"
    return not is_right


@on_ranks(1)
@pytest.mark.parametrize("kind", ["allreduce", "reduce_scatter"])
def test_fake_handlers_need_every_wait_and_every_event(comm: Communicator, kind: str) -> None:
    orderings = fake_arrays.driver().fake_cuda_orderings
    try:
        assert _alone(comm, 0, kind)
        before = [orderings(each) for each in (0, 1)]
        assert _alone(comm, 0, kind)
        counted = [orderings(each) - before[each] for each in (0, 1)]
        assert min(counted) > 1
        for each, name in enumerate(("wait", "record")):
            for number in range(counted[each]):
                noticed = (_is_noticed(comm, kind, f"{name}:{number}", seed) for seed in range(100))
                assert any(noticed), f"{name} {number}"
    finally:
        fake_arrays.configure("recover progress=late ignore=wait:-1 ignore=record:-1")


@on_ranks(3)
def test_fake_device_that_fails(comm: Communicator) -> None:
    """By a kernel of the program, or the copy that a handler asks for: an error of every rank."""
    for failing in ("kernel", "copy_on_device", "pointer_attributes"):
        with a_group(comm) as group, fake_arrays.stream() as stream:
            program = Program(group, stream, aliased=failing == "pointer_attributes")
            x = late(np.ones(1000, np.float32))
            if comm.rank == 1 and failing == "kernel":
                fake_arrays.fail(700)
            elif comm.rank == 1:
                fake_arrays.configure(f"fail={failing}:700")
            with pytest.raises(HandlerError) as caught:
                program.done(program.start("allreduce", "weights", [x]))
            device = () if failing == "pointer_attributes" else ("on device 0",)
            for text in ("rank 1", *device, "CUDA_ERROR_ILLEGAL_ADDRESS (700"):
                assert text in str(caught.value), caught.value
            if failing == "kernel" or comm.rank == 1:
                assert "weights" in str(caught.value)
            with pytest.raises(HandlerError):
                program.start("allreduce", "later", [x])
        assert xla_program.library().multiring_jax_pending_calls() == 0
        assert comm.allreduce(np.ones(2)).tolist() == [3.0, 3.0]


@on_ranks(2)
def test_fake_stream_that_is_captured(comm: Communicator) -> None:
    """Is refused, and the next call is not."""
    with fake_arrays.stream() as stream:
        x = late(np.ones(10, np.float32))
        for aliased in (False, True):
            program = Program(comm, stream, aliased=aliased)
            fake_arrays.driver().fake_cuda_capture(stream, 1)
            with pytest.raises(HandlerError, match=r"UsageError: .*is being captured into a graph"):
                program.start("allreduce", f"captured {aliased}", [x])
            fake_arrays.driver().fake_cuda_capture(stream, 0)
        (y,) = Program(comm, stream).done(program.start("allreduce", "after", [x]))
        assert y.get().tolist() == [2.0] * 10


@on_ranks(2)
def test_fake_calls_that_are_wrong(comm: Communicator) -> None:
    with fake_arrays.stream() as stream:
        x = late(np.ones(4, np.float32))
        with pytest.raises(HandlerError, match="^no stream$"):
            Program(comm, 0).start("allreduce", "x", [x])
        host = np.ones(4, np.float32)
        on_host = Array(host, host)
        program = Program(comm, stream, aliased=True)
        with pytest.raises(HandlerError, match=r"allreduce 'x/0'.*does not lie in a device's memory"):
            program.start("allreduce", "x", [on_host])
        with pytest.raises(HandlerError, match="without its start"):
            program.done(([x, x], 0))
        started = program.start("allgather", "moved", [x], 8)
        results, skipped = started
        with pytest.raises(HandlerError, match="has moved an array"):
            program.done(([results[0], fake_arrays.empty_like(x), results[2]], skipped))
    assert [xla_program.traits(f"{name}_cuda") for name in ("start", "done", "check")] == [0, 0, 0]


@on_ranks(3)
def test_fake_state_is_compared(comm: Communicator) -> None:
    """In the steps for that, whatever the order of the device, in pieces; and no copy is made in others."""
    copies = fake_arrays.driver().fake_cuda_calls
    big = np.arange(2_000_001, dtype=np.float32)
    with a_group(comm) as group, fake_arrays.stream() as stream:
        fake_arrays.configure(f"progress=seeded seed={comm.rank}")
        program = Program(group, stream)
        same = [late(big), late(np.float32(3.0)), late(np.zeros((0, 2), np.float32))]
        before = copies(b"copy_to_host")
        program.check(same, ["big", "one", "none"], 1)
        assert copies(b"copy_to_host") == before  # there is nothing to compare in the first step
        program.check(same, ["big", "one", "none"], 1)
        assert copies(b"copy_to_host") > before
        if comm.rank == 2:
            big[-1] += 1
        with pytest.raises(HandlerError, match=r"MismatchError: .*'big' has checksum .* on rank 2"):
            program.check([late(big), *same[1:]], ["big", "one", "none"], 1)


@on_ranks(2)
def test_fake_state_that_cannot_be_read(comm: Communicator) -> None:
    with a_group(comm) as group, fake_arrays.stream() as stream:
        program = Program(group, stream)
        x = late(np.ones(10, np.float32))
        program.check([x], ["w"], 1)
        if comm.rank == 0:
            fake_arrays.configure("fail=copy_to_host:700")
        with pytest.raises(HandlerError, match=r"rank 0: .*on device 0.*700"):
            program.check([x], ["w"], 1)


STAYING = """
import numpy as np
import multiring
from tests.gpu import fake_arrays
from tests.gpu.xla_program import Program

comm = multiring.init()
calls = fake_arrays.driver().fake_cuda_calls
with fake_arrays.stream(comm.rank) as stream:
    program = Program(comm, stream, aliased=True, device=comm.rank)
    for seed in range(3):
        fake_arrays.configure(f"progress=seeded seed={seed}")
        x = fake_arrays.full(1 << 22, comm.rank + seed, comm.rank)
        rows = fake_arrays.full(1 << 16, comm.rank + seed, comm.rank)
        before = calls(b"copy_to_host")
        sums = program.start("allreduce", f"x{seed}", [x])
        joined = program.start("allgather", f"y{seed}", [rows], 2 << 16)
        (total,), (joined,) = program.done(sums), program.done(joined)
        assert calls(b"copy_to_host") == before
        assert ((total + 1).get() == 2 * seed + 2).all()
        assert (joined.get() == np.repeat([seed, seed + 1], 1 << 16)).all()
print("stayed there", flush=True)
"""


@pytest.mark.parametrize("by", ["nccl", pytest.param("peer memory", marks=pytest.mark.full)])
def test_fake_arrays_that_stay_on_their_devices(tmp_path: Path, by: str) -> None:
    asked = (
        stand_in.with_nccl(tmp_path) | {"MULTIRING_ORDER": "any"} if by == "nccl" else stand_in.with_nvrtc()
    )
    ended = run_job(2, STAYING, code=0, env=asked)
    assert ended.stdout.count("stayed there") == 2, ended.stdout + ended.stderr
