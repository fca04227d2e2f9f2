"""`multiring caffe`: training over ranks, Ctrl-C, continuing, and what is refused."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from multiring.cli import main
from multiring.errors import UsageError
from multiring.models.caffe import TEST, Net, command, device
from multiring.models.caffe.snapshots import read_net, read_state
from tests.support import Job, run_multiring, wait_until

NET = """
layer { name: "data" type: "Data" top: "data" top: "label" data_param { source: "digits" batch_size: 16 } }
layer { name: "norm" type: "BatchNorm" bottom: "data" top: "data" }
layer { name: "scores" type: "InnerProduct" bottom: "data" top: "scores"
  inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "scores" bottom: "label" top: "loss" }
layer { name: "accuracy" type: "Accuracy" bottom: "scores" bottom: "label" top: "accuracy"
  include { phase: TEST } }
"""

SHUFFLED = """
layer { name: "data" type: "ImageData" top: "data" top: "label"
  image_data_param { source: "LIST" batch_size: 2 shuffle: true is_color: false } }
layer { name: "scores" type: "InnerProduct" bottom: "data" top: "scores"
  inner_product_param { num_output: 2 bias_term: false } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "scores" bottom: "label" top: "loss" }
"""


def write(directory: Path, *, max_iter: int, batch: int = 16, more: str = "") -> str:
    (directory / "net.prototxt").write_text(NET.replace("batch_size: 16", f"batch_size: {batch}"))
    path = directory / "solver.prototxt"
    path.write_text(
        f'net: "net.prototxt"\nbase_lr: 0.05\nlr_policy: "fixed"\nmomentum: 0.9\nmax_iter: {max_iter}\n'
        f'snapshot_prefix: "{directory}/shot"\nrandom_seed: 1\ndisplay: 10\nsolver_mode: CPU\n{more}\n'
    )
    return str(path)


def train_losses(log: str) -> dict[int, float]:
    """Losses by iteration, read as Caffe's parse_log.py does: after "Solving" lines begin with their time."""
    lines = log.splitlines()
    begin = next(number for number, line in enumerate(lines) if "Solving" in line)
    found, iteration = {}, -1
    for line in lines[begin:]:
        date, moment = line.split()[:2]
        datetime.strptime(f"2024{date[1:]} {moment}", "%Y%m%d %H:%M:%S.%f")
        if match := re.search(r"Iteration (\d+)", line):
            iteration = int(match[1])
        if match := re.search(r"Train net output #\d+: loss = ([\d.e+-]+)", line):
            found[iteration] = float(match[1])
    return found


def test_two_ranks_train_as_one_with_twice_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks take turns in the data, so the same images are in each step. What one has trained is scored."""
    logs, found = [], []
    for ranks, batch in ((1, 16), (2, 8)):
        directory = tmp_path / str(ranks)
        directory.mkdir()
        words = ["train", "--solver", write(directory, max_iter=20, batch=batch), "--threads", "1"]
        words += ["--sync-batch-norm"]
        if ranks == 1:
            assert main(["caffe", *words]) == 0
            logs.append(capsys.readouterr().err)
        else:
            logs.append(run_multiring("caffe", *words, "-np", str(ranks), code=0).stderr)
        found.append(read_net(directory / "shot_iter_20.caffemodel"))
    for log in logs:
        assert "Optimization Done." in log
        assert train_losses(log).keys() == {0, 10}
    for name, arrays in found[0].items():
        for one, other in zip(arrays, found[1][name], strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)
    model, weights = str(tmp_path / "1/net.prototxt"), str(tmp_path / "1/shot_iter_20.caffemodel")
    assert main(["caffe", "test", "--model", model, "--weights", weights, "--iterations", "10"]) == 0
    lines = capsys.readouterr().err.splitlines()
    net = Net(model, TEST, weights)
    wanted = np.mean([float(net.forward()["accuracy"]) for _ in range(10)])
    assert lines[-2].endswith(f"accuracy = {wanted:g}")
    assert wanted > 0.3  # guessing gives 0.1
    assert main(["caffe", "time", "--model", model, "--iterations", "2"]) == 0
    assert "Average Forward pass:" in capsys.readouterr().err


def test_ranks_share_one_order_of_shuffled_images(tmp_path: Path) -> None:
    """Image k is bright in column k alone, so column k of the weights tells how often it was seen."""
    count = 16
    for number, row in enumerate(np.eye(count, dtype=np.uint8) * 255):
        Image.fromarray(row[None]).save(tmp_path / f"{number}.png")
    (tmp_path / "list.txt").write_text("".join(f"{tmp_path}/{number}.png 0\n" for number in range(count)))
    layers = SHUFFLED.replace("LIST", str(tmp_path / "list.txt"))
    solver = Path(write(tmp_path, max_iter=count // 4, batch=2))
    solver.write_text(solver.read_text().replace("random_seed: 1", "").replace("momentum: 0.9", ""))
    (tmp_path / "net.prototxt").write_text(layers)
    run_multiring("caffe", "train", "--solver", str(solver), "-np", "2", "--threads", "1", code=0)
    weights = read_net(tmp_path / f"shot_iter_{count // 4}.caffemodel")["scores"][0]
    assert (weights != 0).all()
    np.testing.assert_allclose(weights, np.repeat(weights[:, :1], count, axis=1), rtol=1e-5)


def test_ctrl_c_stops_with_a_snapshot_to_continue_from(tmp_path: Path) -> None:
    solver = write(tmp_path, max_iter=1_000_000, more="snapshot: 5")
    command = [sys.executable, "-m", "multiring", "caffe", "train", "--solver", solver, "-np", "2"]
    with Job(lambda _: command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as job:
        wait_until(lambda: list(tmp_path.glob("shot_iter_*.solverstate")), "the first snapshot", 60)
        job.process.send_signal(signal.SIGINT)
        job.ended(None)
    last = max(tmp_path.glob("shot_iter_*.solverstate"), key=lambda path: read_state(path).iteration)
    iteration = read_state(last).iteration
    assert 5 <= iteration < 1_000_000
    assert last.with_suffix(".caffemodel").exists()
    assert not list(tmp_path.glob(".shot*"))
    write(tmp_path, max_iter=iteration + 2)
    assert main(["caffe", "train", "--solver", solver, "--snapshot", str(last), "--threads", "1"]) == 0
    assert read_state(tmp_path / f"shot_iter_{iteration + 2}.solverstate").iteration == iteration + 2


REFUSED = {
    "train --solver SOLVER --gpu 0": "Torch sees no GPU; compute on the CPU",
    "train --solver SOLVER --gpu all -np 2": "Torch sees no GPU; compute on the CPU",
    "train --solver SOLVER --gpu 0,x": "--gpu 0,x: give numbers of GPUs, as in 0,1, or all",
    "train --solver SOLVER --gpu 0,1 -np 3": "names 2 for -np 3: name one for each rank, as in --gpu 0,0",
    "test --model SOLVER --weights b --gpu 0,1": "only train uses several GPUs",
    "train --solver SOLVER -np 0": "-np must be at least 1",
    "train --solver SOLVER --snapshot a --weights b": "not both",
    "train --solver SOLVER --threads 0": "--threads must be at least 1",
    "train --solver nowhere.prototxt": "nowhere.prototxt:1: cannot be read",
    "train --solver SOLVER --snapshot no.solverstate": "cannot read .*no.solverstate",
    "test --model SOLVER --weights b --iterations 0": "--iterations must be at least 1",
}


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    solver = write(tmp_path, max_iter=1)
    for words, told in REFUSED.items():
        code = 1 if told.startswith("cannot read") else 2  # a file, an option
        assert main(["caffe", *(solver if word == "SOLVER" else word for word in words.split())]) == code
        assert re.search(told, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("given", "ranks", "devices"),
    [
        ("--gpu 0,1", 2, "0,1"),
        ("--gpu all", 3, "0,1,2"),
        ("--gpu 1,1 -np 2", 2, "1,1"),
        ("--gpu 2 -np 1", 1, "2"),
    ],
)
def test_a_rank_for_each_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, ranks: int, devices: str
) -> None:
    started = []

    def start(count: int, *words: str) -> None:
        started.append((count, " ".join(words)))
        raise UsageError("started")

    monkeypatch.setattr(command, "start_ranks", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    main(["caffe", "train", "--solver", write(tmp_path, max_iter=1), *given.split()])
    ((count, words),) = started
    assert count == ranks
    assert f"--devices {devices} " in words
    assert "--gpu 0" in words  # of those that a rank sees
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-x,7")
    main(["caffe", "train", "--solver", write(tmp_path, max_iter=1), "--gpu", "1,0"])
    assert "--devices GPU-x,5 " in started[-1][1]


@pytest.mark.parametrize(("rank", "ranks", "ordinal"), [(0, 1, None), (0, 3, 0), (2, 3, 0), (1, 3, 1)])
def test_ranks_share_the_gpus_of_their_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int, ordinal: int | None
) -> None:
    """One process alone has the one that the prototxt names."""
    monkeypatch.setattr(device, "_ordinal", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    comm = SimpleNamespace(
        rank=rank, size=ranks, local_rank=rank, local_size=ranks, broadcast_object=lambda x: x
    )
    arguments = SimpleNamespace(solver=write(tmp_path, max_iter=0), sync_batch_norm=False)
    with pytest.raises(UsageError, match="max_iter is missing"):
        command._train(arguments, comm)
    assert device._ordinal == ordinal
