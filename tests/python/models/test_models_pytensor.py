"""The ResNet in PyTensor: the same numbers as in Torch, and on several ranks the same as on one."""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt
import pytest
import torch

from multiring.models.nets.patches_pytensor import max_of_patches, patches
from tests.python.models.trainer_contract import TrainerContract

SLIDES = [(1, 2, 0), (3, 1, 1), (7, 2, 3)]


class TestPyTensorTrainer(TrainerContract):
    framework = "pytensor"
    size = 3


@pytest.mark.parametrize(("kernel", "stride", "padding"), SLIDES)
def test_patches_are_those_of_torch(kernel: int, stride: int, padding: int) -> None:
    count = 0 if kernel == 3 else 2
    images = np.random.default_rng(0).standard_normal((count, 9, 8, 3))
    matrix, (n, rows, columns) = patches(pt.as_tensor(images), kernel, stride, padding)
    found = matrix.eval(mode="FAST_COMPILE")
    tensor = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    unfolded = torch.nn.functional.unfold(tensor, kernel, padding=padding, stride=stride)
    parts = unfolded.numpy().reshape(count, 3, kernel**2, unfolded.shape[2]).transpose(0, 3, 2, 1)
    np.testing.assert_array_equal(found, parts.reshape(found.shape))
    extents = [int(pt.as_tensor(extent).eval(mode="FAST_COMPILE")) for extent in (n, rows, columns)]
    assert extents == [count, *((extent + 2 * padding - kernel) // stride + 1 for extent in (9, 8))]


@pytest.mark.parametrize(("kernel", "stride", "padding"), SLIDES)
def test_the_gradient_of_patches_is_their_transpose(kernel: int, stride: int, padding: int) -> None:
    generator = np.random.default_rng(0)
    image, direction = generator.standard_normal((2, 2, 7, 6, 2))
    x = pt.tensor4("x", dtype="float64")
    matrix, _ = patches(x, kernel, stride, padding)
    weights = generator.standard_normal(matrix.eval({x: image}, mode="FAST_COMPILE").shape)
    product = (matrix * weights).sum()
    gradient = pt.grad(product, x).eval({x: image}, mode="FAST_COMPILE")
    # The map is linear: its value in any direction is the gradient times that direction.
    expected = product.eval({x: direction}, mode="FAST_COMPILE")
    np.testing.assert_allclose((gradient * direction).sum(), expected, rtol=1e-12)


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
    np.testing.assert_array_equal(
        pooled.eval({x: images}, mode="FAST_COMPILE"), expected.detach().numpy().transpose(0, 2, 3, 1)
    )
    np.testing.assert_array_equal(
        gradient.eval({x: images}, mode="FAST_COMPILE"), tensor.grad.numpy().transpose(0, 2, 3, 1)
    )
