"""`multiring regress` at work: real jobs of Torch, and of frameworks that are Torch with one thing wrong."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import multiring
from multiring.models.frameworks import FRAMEWORKS as ALL
from multiring.models.frameworks import Framework
from multiring.models.nets.resnet_spec import resnet
from multiring.models.regress import tasks
from multiring.models.regress.checks import Setup
from multiring.models.regress.command import regress
from multiring.models.regress.options import Options, add_arguments, parse
from multiring.models.trainers.train_torch import TorchTrainer
from tests.python.regress.results import OTHER, PEERS, TORCH
from tests.support import REPOSITORY, Job, wait_until

TINY = Setup(steps=2, trainings=("float32", "uneven"), epochs=1, speed_depth=8, speed_seconds=0.05)


@pytest.fixture(autouse=True)
def _fakes_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def options(*words: str, **changes: Any) -> Options:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return replace(parse(parser.parse_args(words)), **({"setup": TINY} | changes))


def fake(name: str) -> Framework:
    return replace(OTHER, name=name.lower(), title=name, trainer=name)


Results = dict[tuple[str, int, str], tuple[str, str]]


def run(frameworks: Sequence[Framework], directory: Path, *words: str, **changes: Any) -> tuple[int, Results]:
    """Runs the suite over these frameworks; its exit code, and the status and text of each check."""
    chosen = options(*words, f"--report={directory}", "--baseline=none", **changes)
    chosen = replace(chosen, frameworks=tuple(each.name for each in frameworks))
    code = regress(chosen, {each.name: each for each in (TORCH, *frameworks)}, PEERS)
    rows = json.loads((directory / "report.json").read_text())["checks"]
    return code, {(r["framework"], r["ranks"], r["check"]): (r["status"], r["text"]) for r in rows}


def test_torch_passes_on_one_and_two_ranks_and_the_files_are_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--ranks=1,2", "--checks=agreement,following,bits,speed")
    code, results = run([TORCH, fake("OnlyFloat32")], tmp_path, *words)
    out = capfd.readouterr().out
    assert code == 0, out
    assert {status for status, _ in results.values()} == {"pass"}
    assert len(results) == 8
    assert "all 8 checks passed" in out
    assert len(ElementTree.parse(tmp_path / "junit.xml").findall(".//testcase")) == 8
    assert "All 8 checks passed" in (tmp_path / "index.html").read_text()
    speeds = {row["framework"]: row for row in json.loads((tmp_path / "report.json").read_text())["speeds"]}
    assert speeds["torch"]["own_way"] == "DDP over Gloo"
    assert set(speeds["torch"]["seconds"]) == {"alone", "multiring", "own way"}
    assert set(speeds["onlyfloat32"]["seconds"]) == {"alone", "multiring"}
    refused = "float64 is not there: Other computes in float32 only"
    assert results["onlyfloat32", 2, "following"] == ("pass", refused)


def test_wrong_gradients_ranks_that_diverge_and_other_bits_are_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, results = run([fake("Wrong")], tmp_path, "--ranks=2", "--checks=agreement,following,bits")
    capfd.readouterr()
    assert code == 1
    assert {status for status, _ in results.values()} == {"fail"}
    agreement = results["wrong", 1, "agreement"][1]
    assert "gradients float32: 1.0e-03 (head.dense.bias), limit 1e-04" in agreement
    assert "gradients float64: 1.0e-03 (head.dense.bias), limit 1e-09" in agreement
    assert "scores" not in agreement
    assert "weights float32" in results["wrong", 2, "following"][1]
    assert "ranks that differ after train-float32: rank 1 (state)" in results["wrong", 2, "bits"][1]


def test_errors_kills_and_missing_frameworks_are_told_apart_and_the_others_go_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gone = replace(fake("Gone"), packages=("not_there",), extra="gone")
    setup = replace(TINY, trainings=("float32",))
    frameworks = [gone, fake("Raising"), fake("Killed")]
    code, results = run(frameworks, tmp_path, "--ranks=2", "--checks=following,accuracy", setup=setup)
    capfd.readouterr()
    assert code == 1
    # What comes after the failed task was done all the same, though one epoch is too little.
    assert results.pop(("raising", 2, "accuracy"))[0] == "fail"
    assert {status for status, _ in results.values()} == {"error"}
    raised, killed, missing = (results[name, 2, "following"][1] for name in ("raising", "killed", "gone"))
    assert raised == "train-float32: rank 1: ValueError: the batch is upside down"
    assert killed.startswith("train-float32: rank 1 ")
    assert "SIGKILL" in killed
    assert missing == "not_there is not installed: run pip install 'multiring[gone]'"


def test_a_hang_ends_in_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--checks=accuracy", "--ranks=1", "--time-limit=10")
    code, results = run([fake("Hanging")], tmp_path, *words)
    capfd.readouterr()
    assert code == 1
    hung = "accuracy: it took longer than 10 s and was ended"
    assert results == {("hanging", 1, "accuracy"): ("error", hung)}


def test_low_accuracy_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, results = run([fake("Untaught")], tmp_path, "--checks=accuracy", "--ranks=1")
    capfd.readouterr()
    assert code == 1
    status, text = results["untaught", 1, "accuracy"]
    assert status == "fail"
    assert text.endswith("(of 364 test images), at least 97% is wanted")


LONG = ["--epochs=1000", "--steps=2", "--baseline=none"]
COMMAND = [sys.executable, "-m", "multiring", "regress"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_every_job_and_reports_what_there_is(number: int) -> None:
    words = ["--frameworks=torch", "--checks=agreement,accuracy", "--ranks=1", *LONG]
    with Job(lambda root: [*COMMAND, *words, f"--report={root / 'd' / 'r'}"]) as job:
        assert job.process.stdout is not None
        assert "agreement: pass" in job.process.stdout.readline()
        job.process.send_signal(number)
        done = job.finish()
        job.assert_nothing_left()
        report = json.loads((job.directory / "r" / "report.json").read_text())
    assert done.returncode == 128 + number
    assert "interrupted after 1 of 2 checks" in done.stdout
    assert [(row["check"], row["status"]) for row in report["checks"]] == [
        ("agreement", "pass"),
        ("accuracy", "skip"),
    ]


def test_nothing_is_left_when_the_command_itself_is_killed() -> None:
    words = ["--frameworks=torch", "--checks=agreement,accuracy", "--ranks=1", *LONG]
    with Job(lambda root: [*COMMAND, *words]) as job:
        assert job.process.stdout is not None
        assert "agreement: pass" in job.process.stdout.readline()
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
        wait_until(lambda: not job.processes(), "the end of the jobs")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--frameworks=torhc"], "unknown framework 'torhc'; choose among torch"),
        (["--checks=speeed"], "unknown check 'speeed'; choose among agreement"),
        (["--ranks=1", "--checks=bits"], "bits is about several ranks"),
        (["--ranks=0"], "'0' is no list of numbers of ranks"),
        (["--baseline=/not/there.json"], "/not/there.json is no baseline"),
        (["--write-baseline", "--baseline=none"], "needs a file"),
    ],
)
def test_wrong_options_are_told_before_anything_runs(words: list[str], expected: str) -> None:
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2)
    assert expected in done.stderr


def test_no_framework_is_imported_by_the_command_itself() -> None:
    program = (
        "import sys, multiring.models.regress.command as c; "
        f"sys.exit(any(name in sys.modules for name in {sorted(ALL)!r}))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_no_relu_comes_close_enough_to_zero_for_rounding_to_decide() -> None:
    """See `Setup`: otherwise two correct float32 trainings drift apart."""
    setup = Setup()
    inputs: list[float] = []

    class Watched(TorchTrainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for module in self._model.modules():
                if isinstance(module, torch.nn.ReLU):
                    module.register_forward_pre_hook(
                        lambda _, x: inputs.append(float(x[0].detach().abs().min()))
                    )

    bench = tasks.Bench(
        _Made(Watched),  # type: ignore[arg-type]
        None,
        multiring.init(),
        setup,
        1,
    )
    found = tasks.run_task("train-float64", bench)
    relus = sum(kind == "Relu" for kind in (type(layer).__name__ for layer in _layers(setup)))
    assert len(inputs) == relus * setup.steps
    assert min(inputs) > 5e-6
    losses = np.array(found.values["losses"])
    assert losses[-5:].mean() < 0.8 * losses[:5].mean()  # it learns: agreement is not that of standing still


class _Made:
    def __init__(self, trainer: type[TorchTrainer]) -> None:
        self.make_trainer = trainer


def _layers(setup: Setup) -> Sequence[object]:
    return resnet(setup.depth, classes=10, in_channels=1).layers
