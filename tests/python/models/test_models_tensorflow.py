"""The contract of trainers, over TensorFlow."""

from __future__ import annotations

from tests.python.models.trainer_contract import TrainerContract


class TestTensorFlowTrainer(TrainerContract):
    framework = "tensorflow"
