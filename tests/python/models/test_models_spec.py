"""The ResNet specification: counts against published figures, structure, initial weights."""

from __future__ import annotations

import math
from weakref import WeakSet

import numpy as np
import pytest
import torch

from multiring.errors import UsageError
from multiring.models.nets import resnet_spec
from multiring.models.nets.layers import BatchNorm, Conv
from multiring.models.nets.resnet_spec import INPUT, resnet
from multiring.models.nets.resnet_torch import TorchResNet, load_weights, read_weights
from multiring.models.nets.weights import initial_weights


# Parameters of the bottleneck networks as published with 1000 classes; those of the others counted by hand.
@pytest.mark.parametrize(
    ("depth", "tensors", "values"),
    [(8, 29, 142_392), (20, 65, 336_824), (50, 161, 25_557_032), (101, 314, 44_549_160)],
)
def test_parameter_counts(depth: int, tensors: int, values: int) -> None:
    spec = resnet(depth, classes=1000)
    assert len(spec.parameters()) == len({parameter.name for parameter in spec.parameters()}) == tensors
    assert spec.count_parameters() == values
    assert values == sum(math.prod(parameter.shape) for parameter in spec.parameters())


def test_shapes_and_operations_of_resnet50() -> None:
    spec = resnet(50, classes=1000)
    shapes = spec.shapes(224)
    assert shapes["stem.pool"] == (64, 56, 56)
    assert shapes["stage4.block3.relu"] == (2048, 7, 7)
    assert shapes[spec.output] == (1000,)
    # 4.09 billion multiply-adds, as published for the variant with the stride in the middle.
    assert spec.count_flops(224) == 2 * 4_089_184_256


def test_wrong_arguments_and_too_small_images_are_refused() -> None:
    with pytest.raises(UsageError, match=r"depth 18 .* 8, 20, 50, 101"):
        resnet(18, classes=10)
    with pytest.raises(UsageError, match="unknown stem 'tall'"):
        resnet(8, classes=10, stem="tall")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="at least one class"):
        resnet(8, classes=0)
    bare = Conv("big", (INPUT,), kernel=5, stride=1, padding=0, in_channels=3, out_channels=4)
    spec = resnet_spec.ResNetSpec(8, "cifar", 3, 1, (bare,))
    assert spec.shapes(5)["big"] == (4, 1, 1)
    with pytest.raises(UsageError, match="layer big would get 4 pixels"):
        spec.shapes(4)


def test_initial_weights_are_he_normal_and_depend_on_the_seed_alone() -> None:
    spec = resnet(20, classes=10)
    weights, again, other = (initial_weights(spec, seed, dtype=np.float64) for seed in (3, 3, 4))
    assert list(weights) == [parameter.name for parameter in spec.parameters()] + list(spec.state_shapes())
    assert all(np.array_equal(weights[name], again[name]) for name in weights)
    name = "stage3.block2.conv1.weight"
    assert not np.array_equal(weights[name], other[name])
    # 36,864 draws: their deviation is off by 0.4 % (one sigma).
    assert np.std(weights[name]) == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.02)
    assert np.all(weights["stem.bn.weight"] == 1)
    assert np.all(weights["stem.bn.running_var"] == 1)
    assert not np.any(weights["head.dense.bias"])


def test_zero_residual_makes_every_block_start_as_its_shortcut() -> None:
    spec = resnet(8, classes=10)
    closing = [layer for layer in spec.layers if isinstance(layer, BatchNorm) and layer.closes_block]
    assert [layer.name for layer in closing] == [f"stage{stage}.block1.bn2" for stage in (1, 2, 3)]
    plain, zeroed = initial_weights(spec, 0), initial_weights(spec, 0, zero_residual=True)
    changed = [name for name in plain if not np.array_equal(plain[name], zeroed[name])]
    assert changed == [f"{layer.name}.weight" for layer in closing]
    assert not any(np.any(zeroed[name]) for name in changed)


def test_every_result_is_released_after_its_last_use() -> None:
    spec = resnet(50, classes=10)
    alive: WeakSet[Result] = WeakSet()
    most = 0

    class Result:
        def __init__(self) -> None:
            alive.add(self)

    def apply(layer: object, *inputs: Result | None) -> Result:
        nonlocal most
        result = Result()
        most = max(most, len(alive))
        return result

    last = spec.run(None, apply)
    assert list(alive) == [last]
    assert most <= 3


def test_torch_layers_give_the_specified_shapes() -> None:
    spec = resnet(50, classes=10, in_channels=1)
    expected = spec.shapes(64)
    model = TorchResNet(spec)
    seen: dict[str, tuple[int, ...]] = {}
    for layer in spec.layers:
        model.get_submodule(layer.name).register_forward_hook(
            lambda module, args, out, name=layer.name: seen.update({name: tuple(out.shape[1:])})
        )
    with torch.no_grad():
        model(torch.zeros(2, 1, 64, 64))
    assert seen == {name: shape for name, shape in expected.items() if name != INPUT}


def test_torch_weights_that_do_not_fit_are_refused_before_anything_is_copied() -> None:
    spec = resnet(8, classes=10)
    model = TorchResNet(spec)
    before = read_weights(model)
    weights = initial_weights(spec, 5)
    missing = {name: value for name, value in weights.items() if name != "head.dense.bias"}
    for wrong, message in [
        (missing, "weights lack 1 of .* head.dense.bias"),
        (weights | {"extra": np.zeros(1)}, "lacks, first extra"),
        (weights | {"head.dense.bias": np.zeros(3)}, r"head.dense.bias has shape \(10,\) but .* \(3,\)"),
    ]:
        with pytest.raises(UsageError, match=message):
            load_weights(model, wrong)
    after = read_weights(model)
    assert all(np.array_equal(before[name], after[name]) for name in before)
