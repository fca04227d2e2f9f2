"""The ResNet in PyTensor: the same numbers as in Torch, and on several ranks the same as on one."""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt
import pytest
import torch

from multiring.models.nets.patches_pytensor import max_of_patches
from tests.python.models.trainer_contract import TrainerContract


class TestPyTensorTrainer(TrainerContract):
    framework = "pytensor"
    size = 3


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (2, 2, 0)])
def test_pooling_is_that_of_torch(kernel: int, stride: int, padding: int) -> None:
    # Few different values, so that there are ties.
    images = np.random.default_rng(0).integers(-3, 0, (2, 7, 8, 3)).astype(np.float64)
    tensor = torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).requires_grad_()
    expected = torch.nn.functional.max_pool2d(tensor, kernel, stride, padding)
    weights = torch.arange(expected.numel(), dtype=torch.float64).reshape(expected.shape)
    torch.autograd.backward((expected * weights).sum())
    x = pt.tensor4("x", dtype="float64")
    pooled = max_of_patches(x, kernel, stride, padding)
    gradient = pt.grad((pooled * weights.numpy().transpose(0, 2, 3, 1)).sum(), x)
    for found, wanted in ((pooled, expected.detach()), (gradient, tensor.grad)):
        value = found.eval({x: images}, mode="FAST_COMPILE")
        np.testing.assert_array_equal(value, wanted.numpy().transpose(0, 2, 3, 1))
