"""Synchronised batch normalisation against `torch.nn.BatchNorm` over the joined batch."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multiring.torch
from multiring import Communicator
from multiring.derived import derived
from multiring.errors import MismatchError, UsageError
from tests.on_ranks import all_raise, on_ranks, refuses

LAYERS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CHANNELS = 4


def batch(seed: int, samples: int, dimensions: int, kind: torch.dtype = torch.float64) -> Tensor:
    shape = (samples, CHANNELS, *(3, 2, 2)[:dimensions])
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * 2 + 5).to(kind)


def make_layer(dimensions: int, kind: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = LAYERS[dimensions](CHANNELS, dtype=kind, **options)
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def like_joined_batch(
    comm: Communicator, dimensions: int, samples: Sequence[int], options: dict[str, Any]
) -> list[bytes]:
    """Outputs, gradients and running statistics over steps; returns the bits of the statistics."""
    joined = make_layer(dimensions, **options)
    layer: Any = multiring.torch.convert_sync_batchnorm(copy.deepcopy(joined), comm)
    assert isinstance(layer, multiring.torch.SyncBatchNorm)
    for step in range(3):
        parts = [batch(100 * step + rank, samples[rank], dimensions) for rank in range(comm.size)]
        x = parts[comm.rank].clone().requires_grad_(True)
        whole: Any = torch.cat(parts).requires_grad_(True)
        layer.zero_grad()
        joined.zero_grad()
        output, wanted = layer(x), joined(whole)
        torch.autograd.backward((torch.sin(output) * x.detach()).sum())
        torch.autograd.backward((torch.sin(wanted) * whole.detach()).sum())
        first = sum(samples[: comm.rank])
        mine = slice(first, first + samples[comm.rank])
        torch.testing.assert_close(output, wanted[mine], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(x.grad, whole.grad[mine], rtol=1e-10, atol=1e-11)
        for one, other in zip(layer.parameters(), joined.parameters(), strict=True):
            total = comm.allreduce(one.grad)  # the hooks average it; here it is this rank's part
            torch.testing.assert_close(total, other.grad, rtol=1e-10, atol=1e-11)
        for buffer, other_buffer in zip(layer.buffers(), joined.buffers(), strict=True):
            torch.testing.assert_close(buffer, other_buffer, rtol=1e-12, atol=1e-13)
    layer.eval()
    joined.eval()
    if layer.track_running_stats:
        torch.testing.assert_close(layer(whole), joined(whole), rtol=1e-12, atol=1e-12)
    return [buffer.numpy().tobytes() for buffer in layer.buffers()]


@on_ranks(1, 3)
def test_like_the_joined_batch(comm: Communicator) -> list[Any]:
    batches = [(0, (3, 3, 3)), (1, (5, 1, 2)), (2, (0, 4, 1)), (3, (0, 0, 7)), (0, (1, 1, 1))]
    options: list[dict[str, Any]] = [{"momentum": None}, {"affine": False}, {"track_running_stats": False}]
    cases = [(*each, {}) for each in batches if sum(each[1][: comm.size]) > 1]
    cases += [(2, (3, 1, 2), each) for each in (*options, {"eps": 1e-2, "momentum": 0.3})]
    return [like_joined_batch(comm, *case) for case in cases]


@on_ranks(3)
def test_large_means(comm: Communicator) -> None:
    """A mean far above the deviation loses no more digits than the input itself has lost."""
    kind, offset = torch.float32, 1e4
    parts = [batch(rank, 6, 2) for rank in range(comm.size)]
    parts = [((part - 5) / 2 + offset).to(kind) for part in parts]
    layer: Any = multiring.torch.SyncBatchNorm(CHANNELS, momentum=1.0, dtype=kind, comm=comm)
    layer(parts[comm.rank])
    exact = torch.cat(parts).double()
    mean, variance = exact.mean([0, 2, 3]), exact.var([0, 2, 3])
    unit = torch.finfo(kind).eps
    torch.testing.assert_close(layer.running_mean.double(), mean, rtol=2 * unit, atol=0)
    # Rounding the input costs `unit * offset`; a sum of squares would have cost `unit * offset**2`.
    torch.testing.assert_close(layer.running_var.double(), variance, rtol=4 * unit * offset, atol=0)


def test_half_inputs(comm: Communicator) -> None:
    layer = multiring.torch.SyncBatchNorm(CHANNELS, comm=comm)
    for kind in (torch.bfloat16, torch.float16):
        x: Any = batch(comm.rank, 5, 2, kind).requires_grad_(True)
        output = layer(x.contiguous(memory_format=torch.channels_last))
        assert output.dtype == kind
        assert output.is_contiguous(memory_format=torch.channels_last)
        torch.autograd.backward(output.sum())
        assert x.grad.dtype == kind


def test_conversion(comm: Communicator) -> None:
    shared = nn.BatchNorm1d(3)
    first = nn.Sequential(nn.Linear(3, 3), shared)
    model = nn.ModuleDict({"a": first, "b": shared, "c": nn.SyncBatchNorm(3), "d": nn.InstanceNorm1d(3)})
    shared.eval()
    before = dict(model.named_parameters())
    converted: Any = multiring.torch.convert_sync_batchnorm(model, comm)
    assert converted is model
    layer = converted["a"][1]
    assert isinstance(layer, multiring.torch.SyncBatchNorm)
    assert layer is converted["b"]
    assert not layer.training
    assert layer.label == "SyncBatchNorm a.1"
    assert isinstance(converted["c"], multiring.torch.SyncBatchNorm)
    assert isinstance(converted["d"], nn.InstanceNorm1d)
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    again: Any = multiring.torch.convert_sync_batchnorm(converted, comm)
    assert again["a"][1] is layer
    with pytest.raises(UsageError, match="'x' is a lazy layer"):
        multiring.torch.convert_sync_batchnorm(nn.ModuleDict({"x": nn.LazyBatchNorm1d()}), comm)
    for duplicate in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        duplicate.train()
        duplicate(torch.randn(2, 3))
        assert duplicate.running_mean is not layer.running_mean


class _Tanh(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # the name in torch
        return super().forward(input).tanh()


def test_conversion_of_layers_that_compute_more_is_refused(comm: Communicator) -> None:
    patched, normed = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    patched.forward = functools.partial(_Tanh.forward, patched)  # type: ignore[method-assign]
    torch.nn.utils.parametrize.register_parametrization(normed, "weight", nn.Softplus())
    for layer in (_Tanh(3), patched, normed):
        with pytest.raises(UsageError, match=r"'0' is a \w+, .* derive their class from .*SyncBatchNorm"):
            multiring.torch.convert_sync_batchnorm(nn.Sequential(layer), comm)
    with pytest.raises(UsageError, match="the layer is a _Tanh, which computes something besides"):
        multiring.torch.convert_sync_batchnorm(_Tanh(3), comm)


def test_hooks_go_with_a_converted_layer(comm: Communicator) -> None:
    plain = nn.BatchNorm1d(2)
    plain.weight = None  # type: ignore[assignment]
    handle = plain.register_forward_hook(lambda layer, inputs, output: torch.tanh(output))
    plain.purpose = "its own"  # type: ignore[assignment]
    parts = [torch.randn(4, 2, generator=torch.Generator().manual_seed(rank)) for rank in range(comm.size)]
    converted: Any = multiring.torch.convert_sync_batchnorm(plain, comm)
    assert converted.purpose == "its own"
    wanted = plain(torch.cat(parts))[4 * comm.rank :][:4]
    torch.testing.assert_close(converted(parts[comm.rank]), wanted)
    assert converted.bias.grad is None
    converted(parts[comm.rank]).sum().backward()
    assert converted.bias.grad is not None
    handle.remove()
    assert converted(parts[comm.rank]).abs().max() > 1


def test_a_layer_that_one_module_has_in_several_places(comm: Communicator) -> None:
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(3, 3), shared, nn.Tanh(), shared)
    multiring.torch.convert_sync_batchnorm(model, comm)
    assert isinstance(model[1], multiring.torch.SyncBatchNorm)
    assert model[3] is model[1]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_activations(comm: Communicator, use_reentrant: bool) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
    model = multiring.torch.convert_sync_batchnorm(copy.deepcopy(plain), comm)
    parts = [torch.randn(5, 3, dtype=torch.float64) for _ in range(comm.size)]
    mine, whole = parts[comm.rank].requires_grad_(), torch.cat(parts).detach().requires_grad_()
    checkpoint(model, mine, use_reentrant=use_reentrant).square().sum().backward()
    plain(whole).square().sum().backward()
    assert mine.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(mine.grad, whole.grad[5 * comm.rank :][:5])


def test_refused(comm: Communicator) -> None:
    layer = multiring.torch.SyncBatchNorm(3, comm=comm)
    refuses(UsageError, r"shape \(2, 4\); expected \(batch, 3", layer, torch.randn(2, 4))
    refuses(UsageError, "one value per channel", layer, torch.randn(1 if comm.rank == 0 else 0, 3))
    assert layer(torch.randn(0, 3)).shape == (0, 3)
    assert layer.num_batches_tracked == 0
    model = nn.Sequential(layer)
    hooks = multiring.torch.register_gradient_hooks(model, comm)
    with pytest.raises(UsageError, match="empty batches"), hooks.join():
        pass


@all_raise(MismatchError, "SyncBatchNorm a forward", "SyncBatchNorm b forward")
def test_layers_in_different_order_are_reported(comm: Communicator) -> None:
    model: Any = nn.ModuleDict({"a": nn.BatchNorm1d(3), "b": nn.BatchNorm1d(3)})
    multiring.torch.convert_sync_batchnorm(model, comm.split(0))  # this one will be broken
    model["a" if comm.rank == 0 else "b"](torch.randn(2, 3))


def test_one_derived_communicator_that_ends_with_its_parent(comm: Communicator) -> None:
    """All layers of a communicator share one derived from it, which ends with it."""
    parent: Any = comm.split(0)
    layers = [multiring.torch.SyncBatchNorm(3, comm=parent) for _ in range(3)]
    for layer in layers:
        layer(torch.randn(2, 3))
    child = derived(parent, "sync_batchnorm")
    parent.close()
    with pytest.raises(multiring.AbortedError):
        layers[0](torch.randn(2, 3))
    dropped = [weakref.ref(parent), weakref.ref(child)]
    del parent, child, layers, layer
    gc.collect()
    assert [ref() for ref in dropped] == [None, None]


@pytest.mark.full
def test_compiled_network(comm: Communicator) -> None:
    """Compilation leaves the layers out."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 3), nn.BatchNorm1d(3)]
    alone = nn.Sequential(*layers).double()
    model = multiring.torch.convert_sync_batchnorm(copy.deepcopy(alone), comm)
    runner = torch.compile(model, backend="aot_eager")
    for step in range(2):
        parts = [batch(step + rank, 4, 2) for rank in range(comm.size)]
        output = runner(parts[comm.rank])
        wanted = alone(torch.cat(parts))[4 * comm.rank : 4 * comm.rank + 4]
        torch.testing.assert_close(output, wanted, rtol=1e-10, atol=1e-11)
        torch.autograd.backward(output.sum())


def test_a_gradient_of_a_gradient_is_refused_with_the_layer(comm: Communicator) -> None:
    plain = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model = multiring.torch.convert_sync_batchnorm(plain, comm)
    x = torch.randn(4, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(UsageError, match=r"SyncBatchNorm 1: a gradient of its gradient .*torch.nn.BatchNorm"):
        slope.square().sum().backward()
    model(x).square().sum().backward()  # the layer is as it was
    assert x.grad is not None
