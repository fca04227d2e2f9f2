"""Sharded parameters: every reduction of FSDP2 and HSDP against NumPy, and checkpoints."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from multiring import Communicator
from multiring.torch_distributed import operations
from tests.adapters.torch_distributed.support import fresh_directory, numbers, with_world, world

R = dist.ReduceOp
SHAPE = (6, 4)
# Divisors of the sum, None: the number of ranks; and whether only sums may be asked for.
DIVISORS = [(None, False), (2.0, False), (8.0, False), (None, True), (8.0, True)]


class _Weighted(torch.nn.Module):
    """A sum whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(numbers(SHAPE, 99))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.weight * inputs).sum()


def _gradient(rank: int, mesh: Any, dtype: torch.dtype, divisor: float | None, sums: bool) -> torch.Tensor:
    model: Any = fully_shard(_Weighted(), mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, dtype))
    if divisor is not None:
        model.set_gradient_divide_factor(divisor)
    model.set_force_sum_reduction_for_comms(sums)
    model(numbers(SHAPE, rank)).backward()
    gradient: torch.Tensor = model.weight.grad.full_tensor()
    return gradient


@with_world(2, 4, (4, 2))
def test_every_reduction_of_sharded_gradients(comm: Communicator) -> None:
    flat = init_device_mesh("cpu", (comm.size,))
    meshes = [flat] if comm.size == 2 else [flat, init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))]
    total = np.sum([numbers(SHAPE, rank).double().numpy() for rank in range(comm.size)], 0)
    used: list[Any] = []
    for mesh in meshes:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for divisor, sums in DIVISORS:
                with mock.patch.object(
                    operations, "reduce_scatter_single", wraps=operations.reduce_scatter_single
                ) as spy:
                    found = _gradient(comm.rank, mesh, dtype, divisor, sums)
                used += [call.args[3] for call in spy.call_args_list]
                wanted = total / (divisor or comm.size)  # exact in all three
                what = f"{mesh} {dtype} {divisor} {sums}"
                np.testing.assert_array_equal(found.double().numpy(), wanted, err_msg=what)
    assert all(any(op == known for op in used) for known in (R.SUM, R.AVG, R.PREMUL_SUM))


def test_checkpoints(comm: Communicator) -> None:
    with world(comm), fresh_directory(comm) as directory:
        mesh = init_device_mesh("cpu", (2,))
        whole = numbers((6, 2), 0)
        saved = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "plain": whole + 1, "step": 7}
        checkpoint.save(saved, checkpoint_id=str(directory / "sync"))
        future: Any = checkpoint.async_save(saved, checkpoint_id=str(directory / "async"))
        future.result()
        for name in ("sync", "async"):
            zeros = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])
            # One of them is on no device yet, and gets memory as it is loaded.
            loaded: dict[str, Any] = {"sharded": zeros, "plain": torch.empty(6, 2, device="meta"), "step": 0}
            checkpoint.load(loaded, checkpoint_id=str(directory / name))
            assert torch.equal(loaded["sharded"].full_tensor(), whole)
            assert torch.equal(loaded["plain"], whole + 1)
            assert loaded["step"] == 7


@with_world()
def test_a_model_that_rank_0_alone_has(comm: Communicator) -> None:
    model: Any = fully_shard(_Weighted(), mesh=init_device_mesh("cpu", (2,)))
    state = {"weight": numbers(SHAPE, 5)} if comm.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    assert torch.equal(model.weight.full_tensor(), numbers(SHAPE, 5))
    dist.barrier()
