"""What it costs in Torch to keep the rest of the training state in step: buffers, and the check for drift."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from multiring import Communicator, config
from multiring.benchmarks.gradients.report import StateRow
from multiring.benchmarks.measure import Meeting, Sample
from multiring.benchmarks.progress import rounds
from multiring.models.nets.resnet_spec import resnet
from multiring.models.nets.resnet_torch import TorchResNet
from multiring.state.check import StateCheck
from multiring.torch.model_buffers import ModelBuffers

__all__ = ["measure_state"]


def measure_state(comm: Communicator, meeting: Meeting, turns: int) -> tuple[StateRow, ...]:
    """Measure for ResNet-20 and ResNet-50; called on all ranks; the same rows on all."""
    models = {
        "ResNet-20": resnet(20, classes=10, in_channels=3, stem="cifar"),
        "ResNet-50": resnet(50, classes=1000, stem="imagenet"),
    }
    rows = []
    for name, spec in models.items():
        torch.manual_seed(0)
        rows.append(_measure(comm, meeting, turns, name, TorchResNet(spec)))
    return tuple(rows)


def _measure(comm: Communicator, meeting: Meeting, turns: int, name: str, model: nn.Module) -> StateRow:
    own = comm.split(0)
    assert own is not None
    parameters = list(model.parameters())
    buffers = ModelBuffers(model, lambda: parameters, own, "broadcast")
    active = np.ones(own.size, dtype=np.bool_)
    check = StateCheck(own, 1)

    def synchronise() -> None:
        buffers.begin(own, active)
        buffers.end()

    synchronised = _times(comm, meeting, turns, f"buffers of {name}", synchronise)
    arrays = [(key, tensor.detach().numpy()) for key, tensor in model.state_dict().items()]
    compared = _times(comm, meeting, turns, f"checks of {name}", lambda: check.compare(arrays))
    held = sum(tensor.nbytes for tensor in model.buffers())
    own.close()
    interval = config.load().check_every
    return StateRow(name, held, sum(array.nbytes for _, array in arrays), synchronised, compared, interval)


def _times(comm: Communicator, meeting: Meeting, turns: int, what: str, act: Callable[[], None]) -> Sample:
    """Seconds from when the last rank begins to when the last rank is done."""
    act()
    times = []
    for _ in rounds(what, turns):
        meeting()
        begin = time.perf_counter_ns()
        act()
        times.append((begin, time.perf_counter_ns()))
    begin_end = comm.allreduce(np.array(times, np.int64), op="max")
    return Sample.of((begin_end[:, 1] - begin_end[:, 0]) / 1e9)
