"""The ResNet in the Caffe-style solver: the same numbers as in Torch, and N ranks like one."""

from __future__ import annotations

from multiring import Communicator
from multiring.models.nets.resnet_caffe import load_weights, read_weights
from multiring.models.nets.resnet_spec import resnet
from multiring.models.nets.weights import initial_weights
from multiring.models.trainers.train_caffe import CaffeTrainer
from tests.python.models.trainer_contract import (
    SPEC,
    TrainerContract,
    make,
    recipe,
    relative,
    whole_batch,
    worst,
)


class TestCaffeTrainer(TrainerContract):
    framework = "caffe"
    size = 3

    def test_bottlenecks_are_those_of_torch(self, comm: Communicator) -> None:
        spec, batch = resnet(50, classes=10, in_channels=3), whole_batch(0, count=2, size=64, channels=3)
        trainers = [
            make(name, comm, spec, seed=0, dtype="float64", zero_residual=True) for name in ("caffe", "torch")
        ]
        found, expected = (trainer.probe(batch) for trainer in trainers)
        assert relative(found.scores, expected.scores) < 1e-9
        assert worst(found.gradients, expected.gradients)[0] < 1e-9
        for trainer in trainers:
            trainer.close()

    def test_weights_are_what_was_loaded(self, comm: Communicator) -> None:
        trainer = CaffeTrainer(SPEC, recipe(), comm, seed=0)
        weights = initial_weights(SPEC, 7)
        load_weights(trainer._net, SPEC, weights)
        assert worst(read_weights(trainer._net, SPEC), weights)[0] == 0.0
        trainer.close()
