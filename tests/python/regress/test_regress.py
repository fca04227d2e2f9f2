"""`multiring regress` at work: real jobs of Torch, and of frameworks that are Torch with one thing wrong."""

from __future__ import annotations

import os
import re
import signal
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
from multiring.commands.frameworks import Framework
from multiring.models.nets.resnet_spec import resnet
from multiring.models.regress import tasks, worker
from multiring.models.regress.checks import Setup
from multiring.models.regress.command import regress
from multiring.models.regress.options import add_arguments, parse
from multiring.models.regress.outcome import State, read_outcome
from multiring.models.trainers.train_torch import TorchTrainer
from tests.python.regress.results import OTHER, TORCH
from tests.support import REPOSITORY, Job, parsed, refused, wait_until

TINY = Setup(steps=2, trainings=("float32", "uneven"), epochs=1, speed_depth=8, speed_seconds=0.05)


@pytest.fixture(autouse=True)
def _fakes_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def fake(name: str) -> Framework:
    return replace(OTHER, name=name.lower(), title=name, trainer=name)


Results = dict[tuple[str, int, str], tuple[str, str]]


def run(
    frameworks: Sequence[Framework], directory: Path, *words: str, setup: Setup = TINY
) -> tuple[int, Results]:
    """Runs the suite over these frameworks; its exit code, and the status and text of each check."""
    chosen = parse(parsed(add_arguments, *words, f"--report={directory}", "--baseline=none"))
    chosen = replace(chosen, setup=setup, frameworks=tuple(each.name for each in frameworks))
    code = regress(chosen, {each.name: each for each in (TORCH, *frameworks)})
    return code, read_junit(directory)


def read_junit(directory: Path) -> Results:
    results = {}
    for case in ElementTree.parse(directory / "junit.xml").findall(".//testcase"):
        check, ranks = re.fullmatch(r"(\w+) on (\d+) ranks?", case.attrib["name"]).groups()
        found = [child for child in case if child.tag in ("failure", "error", "skipped")]
        status, text = (found[0].attrib["type"], found[0].attrib["message"]) if found else ("pass", "")
        results[case.attrib["classname"].rpartition(".")[2], int(ranks), check] = (status, text)
    return results


def test_torch_passes_on_one_and_two_ranks_and_the_files_are_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--ranks=1,2", "--checks=agreement,following,bits,speed")
    code, results = run([TORCH], tmp_path, *words)
    out = capfd.readouterr().out
    assert code == 0, out
    assert {status for status, _ in results.values()} == {"pass"}
    assert len(results) == 4
    assert "all 4 checks passed" in out
    assert "torch, 1 rank, probe-float32: done" in out
    assert "DDP over Gloo" in (tmp_path / "index.html").read_text()


def test_what_a_framework_does_not_have_is_handed_over_as_that(tmp_path: Path) -> None:
    bench = tasks.Bench(fake("OnlyFloat32"), multiring.init(), TINY, 1)
    worker._run("train-float64", bench, tmp_path)
    outcome = read_outcome(tmp_path, "train-float64")
    assert outcome is not None
    refused = "float64 is not there: Other computes in float32 only"
    assert (outcome.state, outcome.why) == (State.UNAVAILABLE, refused)


def test_wrong_gradients_ranks_that_diverge_and_other_bits_are_found(tmp_path: Path) -> None:
    code, results = run([fake("Wrong")], tmp_path, "--ranks=2", "--checks=agreement,following,bits")
    assert code == 1
    assert {status for status, _ in results.values()} == {"fail"}
    agreement = results["wrong", 1, "agreement"][1]
    assert "gradients float32: 1.0e-03 (head.dense.bias), limit 1e-04" in agreement
    assert "gradients float64: 1.0e-03 (head.dense.bias), limit 1e-09" in agreement
    assert "scores" not in agreement
    assert "weights float32" in results["wrong", 2, "following"][1]
    assert "ranks that differ after train-float32: rank 1 (state)" in results["wrong", 2, "bits"][1]


def test_errors_kills_and_missing_frameworks_are_told_apart_and_the_others_go_on(tmp_path: Path) -> None:
    gone = replace(fake("Gone"), packages=("not_there",))
    setup = replace(TINY, trainings=("float32",))
    frameworks = [gone, fake("Raising"), fake("Killed")]
    code, results = run(frameworks, tmp_path, "--ranks=2", "--checks=bits,accuracy", setup=setup)
    assert code == 1
    # What comes after the failed task was done all the same, though one epoch is too little.
    assert results.pop(("raising", 2, "accuracy"))[0] == "fail"
    assert {status for status, _ in results.values()} == {"error"}
    raised, killed, missing = (results[name, 2, "bits"][1] for name in ("raising", "killed", "gone"))
    assert raised == "train-float32: rank 1: ValueError: the batch is upside down"
    assert killed.startswith("train-float32: rank 1 ")
    assert "SIGKILL" in killed
    assert missing == "not_there is not installed: run pip install 'multiring[gone]'"


def test_a_hang_ends_in_time(tmp_path: Path) -> None:
    words = ("--checks=accuracy", "--ranks=1", "--time-limit=10")
    hung = "accuracy: it took longer than 10 s and was ended"
    expected = {("hanging", 1, "accuracy"): ("error", hung)}
    assert run([fake("Hanging")], tmp_path, *words) == (1, expected)


LONG = [sys.executable, "-m", "multiring", "regress", "--frameworks=torch", "--checks=agreement,accuracy"]
LONG += ["--ranks=1", "--epochs=1000", "--steps=2", "--baseline=none"]


def probed(job: Job) -> None:
    """Returns when the agreement can be judged, and the training has begun."""
    while "train-float64: done" not in (line := job.process.stdout.readline()):
        assert line


def test_an_interruption_ends_every_job_and_reports_what_there_is() -> None:
    with Job(lambda root: [*LONG, f"--report={root / 'd' / 'r'}"]) as job:
        probed(job)
        job.process.send_signal(signal.SIGINT)
        done = job.ended(128 + signal.SIGINT)
        results = read_junit(job.directory / "r")
    assert "interrupted after 1 of 2 checks" in done.stdout
    assert [status for status, _ in results.values()] == ["pass", "skip"]


def test_nothing_is_left_when_the_command_itself_is_killed() -> None:
    with Job(LONG) as job:
        probed(job)
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
        wait_until(lambda: not job.processes(), "the end of the jobs")


WRONG = {
    "--frameworks=torhc": "unknown framework 'torhc'; choose among torch",
    "--checks=speeed": "unknown check 'speeed'; choose among agreement",
    "--ranks=0": "'0' is no list of numbers of ranks",
    "--ranks=1 --checks=bits": "bits is about several ranks",
    "--write-baseline --baseline=none": "needs a file",
    "--baseline=/not/there.json": "--baseline: /not/there.json is no baseline",
}


def test_wrong_options_are_told_before_anything_runs() -> None:
    for words, told in WRONG.items():
        assert told in refused("regress", *words.split())


def test_no_relu_comes_close_enough_to_zero_for_rounding_to_decide(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(tasks, "load_trainer", lambda framework: Watched)
    bench = tasks.Bench(TORCH, multiring.init(), setup, 1)
    found = tasks.run_task("train-float64", bench)
    layers = resnet(setup.depth, classes=10, in_channels=1).layers
    relus = sum(type(layer).__name__ == "Relu" for layer in layers)
    assert len(inputs) == relus * setup.steps
    assert min(inputs) > 5e-6
    losses = np.array(found.values["losses"])
    assert losses[-5:].mean() < 0.8 * losses[:5].mean()  # it learns: agreement is not that of standing still
