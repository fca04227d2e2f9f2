"""The ResNet in the Caffe-style solver: the same numbers as in Torch, and N ranks like one."""

from __future__ import annotations

import pytest

from multiring import Communicator
from multiring.models.nets.resnet_spec import resnet
from tests.python.models.trainer_contract import TrainerContract, make, relative, whole_batch, worst


class TestCaffeTrainer(TrainerContract):
    framework = "caffe"
    size = 3


@pytest.mark.parametrize("framework", ["caffe", "chainer"])
def test_bottlenecks_are_those_of_torch(comm: Communicator, framework: str) -> None:
    spec, batch = resnet(50, classes=10, in_channels=3), whole_batch(0, count=2, size=64, channels=3)
    trainers = [
        make(name, comm, spec, seed=0, dtype="float64", zero_residual=True) for name in (framework, "torch")
    ]
    found, expected = (trainer.probe(batch) for trainer in trainers)
    assert relative(found.scores, expected.scores) < 1e-9
    assert worst(found.gradients, expected.gradients)[0] < 1e-9
    for trainer in trainers:
        trainer.close()
