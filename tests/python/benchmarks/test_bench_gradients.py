"""`multiring bench gradients`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from multiring import Communicator
from multiring.benchmarks.gradients import benchmark as gradients
from multiring.benchmarks.gradients.adapter_gradients import measure_reduction
from multiring.benchmarks.gradients.report import AdapterReport, GradientsReport, Memory, StepRow
from multiring.benchmarks.gradients.steps import GradientsOnly, gradient_shapes
from multiring.benchmarks.gradients.training_speed import TrainingSpeed
from multiring.benchmarks.machine import Machine
from multiring.benchmarks.measure import Meeting, Sample
from multiring.benchmarks.memory import PeakMemory, proportional_bytes
from multiring.commands.frameworks import OwnWay
from multiring.errors import InternalError, UsageError
from tests.python.benchmarks.test_bench import measured
from tests.rank_pool import RankPool
from tests.support import parsed, wait_until

RUN: dict[str, Any] = {
    "launcher": "multiring",
    "machine": Machine("a processor", 2, 2**30, "Linux 6", "3.11", {"multiring": "0.1"}),
    "ranks": 2,
    "date": "2026-01-01T00:00:00+00:00",
}


def sample(seconds: float) -> Sample:
    return Sample(seconds, seconds * 0.9, seconds * 1.1, 10)


def test_what_follows_from_the_times() -> None:
    names = ["no synchronisation", "multiring", "DDP over Gloo"]
    report = GradientsReport(
        command="multiring bench gradients",
        **RUN,
        bytes=102_228_128,
        batch=32,
        gradients=tuple(StepRow(n, sample(s)) for n, s in zip(names, [0.01, 0.02, 0.11], strict=True)),
        training=tuple(StepRow(n, sample(s)) for n, s in zip(names, [0.1, 0.125, 0.2], strict=True)),
        memory={names[0]: Memory(200 << 20, 201 << 20), names[1]: Memory(210 << 20, 320 << 20)},
    )
    ours, ddp = report.gradients[1:]
    assert report.communication(ours) == pytest.approx(0.01)
    assert report.communication(ddp) == pytest.approx(0.1)
    assert report.more_memory(ours) == Memory(10 << 20, 120 << 20)
    assert report.efficiency(report.training[1]) == pytest.approx(0.8)
    assert report.images_per_second(report.training[1]) == pytest.approx(512)
    assert not report.is_noisy(report.training[1])
    scattered = StepRow("multiring", Sample(0.11, 0.08, 0.3, 10))
    assert replace(report, training=(report.training[0], scattered)).is_noisy(scattered)


def test_a_step_gives_every_weight_a_gradient() -> None:
    shapes = gradient_shapes()[:5]
    model = GradientsOnly(shapes)
    torch.autograd.backward(model())
    assert [tuple(weight.grad.shape) for weight in model.weights] == [tuple(shape) for shape in shapes]
    assert all((weight.grad == 1).all() for weight in model.weights)


def test_memory_is_seen() -> None:
    before = proportional_bytes()
    with PeakMemory() as peak:
        held = bytearray(64 << 20)
        held[::4096] = b"x" * len(held[::4096])
        wait_until(lambda: peak.bytes - before > 60 << 20, "a look at the memory")
        del held
    assert peak.bytes - before > 60 << 20


def test_a_run_measures_prints_and_writes_and_leaves_nothing() -> None:
    words = ["-np", "2", "--steps", "1", "--fsdp", "--plot", "DIR/r.png"]
    done, files = measured(*words, benchmark="gradients")
    report = json.loads(files["r.json"])
    assert sorted(files) == ["r.json", "r.png"]
    names = ["no synchronisation", "multiring", "hvd.DistributedOptimizer"]
    names += [f"{way} over {by}" for way in ("DDP", "FSDP2") for by in ("multiring", "Gloo")]
    assert [row["name"] for row in report["gradients"]] == names
    assert report["ranks"] == 2
    assert [row["name"] for row in report["state"]] == ["ResNet-20", "ResNet-50"]
    assert all(name in done.stdout for name in names)


def test_what_follows_from_the_times_of_an_adapter() -> None:
    seconds = {"alone": [0.1, 0.1, 0.2], "multiring": [0.125, 0.125, 0.25], "own way": [0.2, 0.2, 0.4]}
    report = AdapterReport(
        command="multiring bench gradients --framework torch",
        **RUN,
        framework="Torch",
        bytes=102_228_128,
        core=(0.02, 0.04, 0.03),
        adapter=(0.022, 0.048, 0.033),
        training=TrainingSpeed(2, 32, 1, seconds, "DDP over Gloo"),
    )
    assert report.overhead.median == pytest.approx(1.1)
    assert report.training.efficiency.median == pytest.approx(0.8)
    assert report.training.over_own_way.median == pytest.approx(1.6)
    assert report.training.images_per_second("multiring") == pytest.approx(512)


def reduce_and_check(comm: Communicator, framework: str, astray: bool) -> str:
    shapes = [(3, 2), (), (1000,), (0,)]
    module = importlib.import_module(f"multiring.benchmarks.gradients.frameworks.{framework}")
    reduction = module.make_reduction(shapes, comm)
    if astray:
        honest = reduction.run
        reduction.run = lambda value, begin: honest(value + comm.rank, begin)
    try:
        core, adapter = measure_reduction(comm, Meeting(comm, 1), reduction, shapes, 3)
    except InternalError as error:
        return str(error)
    finally:
        reduction.close()
    assert min(core) > 0
    assert min(adapter) > 0
    return f"{len(core)} {len(adapter)}"


@pytest.mark.parametrize("framework", ["torch", "chainer", "caffe"])
def test_a_reduction_is_timed_in_turns_with_the_core_and_checked(
    ranks: Callable[[int], RankPool], framework: str
) -> None:
    assert ranks(2).run(reduce_and_check, framework, False) == ["3 3", "3 3"]
    for error in ranks(2).run(reduce_and_check, framework, True):
        assert "does not give" in error


def test_the_adapter_of_torch_is_measured() -> None:
    words = ["--framework=torch", "--steps=1", "--format=markdown", "--plot=DIR/r.png"]
    done, files = measured(*words, benchmark="gradients")
    report = json.loads(files["r.json"])
    assert "| adapter |" in done.stdout
    assert report["bytes"] == 102_228_128
    assert set(report["training"]["seconds"]) == {"alone", "limit", "multiring", "own way"}


def test_without_torch_another_framework_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients.importlib.util, "find_spec", lambda name: None)
    args = parsed(gradients.add_arguments)
    assert args.peers == []
    with pytest.raises(UsageError, match=r"name another one, or run pip install 'multiring\[bench,torch\]'"):
        gradients.run(None, args)  # type: ignore[arg-type]


@pytest.mark.parametrize(("framework", "peers"), [("chainer", None), ("torch", []), ("jax", [])])
def test_mpi_starts_the_ranks_where_the_frameworks_own_way_needs_it(
    framework: str, peers: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnWay, "missing", ())
    assert parsed(gradients.add_arguments, f"--framework={framework}").peers == peers
