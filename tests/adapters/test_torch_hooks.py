"""Gradient hooks of Torch beyond the contract: when and how they run, and what goes wrong."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import multiring.torch
import pytest
import torch
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.rank_pool import RankPool

Pool = Callable[[int], RankPool]
SMALL = {"bucket_bytes": 256, "first_bucket_bytes": 64}


def make_model(seed: int = 0, inputs: int = 6) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def draw(seed: int, samples: int = 4) -> Tensor:
    return torch.randn(samples, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


Loss = Callable[[Any, int], Tensor]


def expected(comm: Communicator, loss: Loss, make: Callable[[], nn.Module] = make_model) -> list[Any]:
    """Gradients of each rank's loss, computed here one after the other and averaged; None where no rank has one."""
    every = []
    for rank in range(comm.size):
        model = make()
        torch.autograd.backward(loss(model, rank))
        every.append(gradients_of(model))
    return [
        None if all(g is None for g in gs) else sum(g for g in gs if g is not None) / comm.size
        for gs in zip(*every, strict=True)
    ]


def assert_gradients(model: nn.Module, wanted: list[Any], comm: Communicator) -> None:
    found = gradients_of(model)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    bits = comm.allgather_object([None if g is None else g.numpy().tobytes() for g in found])
    assert all(other == bits[0] for other in bits)


def squares(model: nn.Module, rank: int) -> Tensor:
    return (model(draw(rank)) ** 2).mean()


def gradients_are_views(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    wanted = expected(comm, squares)
    addresses: list[list[int]] = []
    for step in range(4):
        model.zero_grad(set_to_none=step != 3)
        torch.autograd.backward(squares(model, comm.rank))
        assert_gradients(model, wanted, comm)
        addresses.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
    # Planned anew once, after the first step; then always in the same places.
    assert addresses[1] == addresses[2] == addresses[3]
    before = gradients_of(model)
    hooks.remove()
    hooks.remove()
    assert [p.grad.data_ptr() for p in model.parameters() if p.grad is not None] != addresses[3]
    for old, new in zip(before, gradients_of(model), strict=True):
        assert old is not None
        assert torch.equal(old, new)  # type: ignore[arg-type]
    model.zero_grad()
    torch.autograd.backward(squares(model, comm.rank))
    own = expected(comm, lambda model, _: squares(model, comm.rank))
    for parameter, local in zip(model.parameters(), own, strict=True):
        torch.testing.assert_close(parameter.grad, local, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_views_of_buckets_until_the_hooks_are_removed(ranks: Pool, size: int) -> None:
    ranks(size).run(gradients_are_views)


class _Observe(torch.autograd.Function):
    """Tells in the backward pass how many buckets have left."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[], None]) -> Tensor:
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.look()
        return gradient, None


class _Spy:
    """A communicator that notes the names of the buckets that leave."""

    def __init__(self, comm: Communicator, sent: list[str]) -> None:
        self._comm, self._sent = comm, sent

    def allreduce_async(self, *args: Any, **options: Any) -> Any:
        self._sent.append(options["name"])
        return self._comm.allreduce_async(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def buckets_leave_early(comm: Communicator) -> list[list[str]]:
    """With a parameter that rank 1 does not use: its bucket, and those behind it, wait for the end there."""
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    sent: list[str] = []
    reducer = hooks._slots.reducer
    assert reducer._comm is not None
    reducer._comm = _Spy(reducer._comm, sent)  # type: ignore[assignment]
    seen: list[int] = []
    history = []
    for step in range(2):
        model.zero_grad()
        sent.clear()
        seen.clear()
        x = _Observe.apply(model[0](draw(comm.rank)), lambda: seen.append(len(sent)))  # type: ignore[no-untyped-call]
        x = model[2](torch.tanh(x))
        if step == 0 or comm.rank == 0:
            x = model[4](torch.tanh(x))
        torch.autograd.backward((x**2).mean())
        early = seen[0]
        assert (early > 0) == (step == 0 or comm.rank == 0)
        assert early < len(sent)
        history.append(list(sent))
    hooks.remove()
    return history


def test_buckets_leave_during_backward_and_in_the_same_order_everywhere(ranks: Pool) -> None:
    results = ranks(2).run(buckets_leave_early)
    assert results[0] == results[1]
    assert len(results[0][1]) > 3


def buckets_follow_arrival(comm: Communicator) -> None:
    """The model registers its layers in the order in which gradients arrive, the reverse of the usual."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({str(k): nn.Linear(6, 6) for k in range(4)}).double()

    def loss(model: Any, rank: int) -> Tensor:
        x = draw(rank)
        for k in reversed(range(4)):
            x = torch.tanh(model[str(k)](x))
        return x.sum()

    model = make()
    hooks = multiring.torch.register_gradient_hooks(model, comm, bucket_bytes=300, first_bucket_bytes=300)
    wanted = expected(comm, loss, make)
    plans = []
    for _ in range(3):
        model.zero_grad()
        torch.autograd.backward(loss(model, comm.rank))
        assert_gradients(model, wanted, comm)
        plans.append([slot.index for bucket in hooks._slots.reducer.plan.buckets for slot in bucket.slots])
    # Layer 0 is applied last, so its gradients arrive first; within a layer, weight and bias in either order.
    assert [index // 2 for index in plans[0]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert plans[0] == plans[1] == plans[2]
    hooks.remove()


def test_buckets_follow_the_order_of_arrival(ranks: Pool) -> None:
    ranks(2).run(buckets_follow_arrival)


def reentrant(comm: Communicator, use_reentrant: bool) -> None:
    def loss(model: Any, rank: int) -> Tensor:
        x = draw(rank).requires_grad_(True)
        x = checkpoint(lambda z: torch.tanh(model[0](z)), x, use_reentrant=use_reentrant)
        x = checkpoint(
            lambda z: checkpoint(model[2], z, use_reentrant=use_reentrant), x, use_reentrant=use_reentrant
        )
        return (checkpoint(model[4], x, use_reentrant=use_reentrant) ** 2).mean()

    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    wanted = expected(comm, loss)
    for _ in range(2):
        model.zero_grad()
        torch.autograd.backward(loss(model, comm.rank))
        assert_gradients(model, wanted, comm)
    assert hooks.rounds == 2
    hooks.remove()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_parts(ranks: Pool, use_reentrant: bool) -> None:
    ranks(2).run(reentrant, use_reentrant)


def second_gradient(comm: Communicator) -> None:
    model = nn.Linear(6, 6).double()
    hooks = multiring.torch.register_gradient_hooks(model, comm)
    x = draw(0).requires_grad_(True)
    y = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(UsageError, match=r"received a second gradient .*use_reentrant=False"):
        torch.autograd.backward(y.sum())
    model.zero_grad()
    torch.autograd.backward(model(x).sum())
    hooks.remove()


def test_a_second_gradient_in_a_round_is_refused(ranks: Pool) -> None:
    ranks(2).run(second_gradient)


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("the loss has exploded")


def fail_everywhere(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    for step in range(3):
        if step != 1:
            model.zero_grad()
            torch.autograd.backward(squares(model, comm.rank))
            assert_gradients(model, expected(comm, squares), comm)
            continue
        with pytest.raises(ArithmeticError, match="exploded"):
            torch.autograd.backward(model[2:](_Fail.apply(model[:2](draw(0)))).sum())  # type: ignore[no-untyped-call]
    hooks.remove()


def test_hooks_survive_a_backward_pass_that_fails_on_all_ranks(ranks: Pool) -> None:
    ranks(2).run(fail_everywhere)


def fail_on_one(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    if comm.rank == 1:
        with pytest.raises(ArithmeticError, match="exploded"):
            torch.autograd.backward(model[2:](_Fail.apply(model[:2](draw(0)))).sum())  # type: ignore[no-untyped-call]
        model.zero_grad()
    try:
        torch.autograd.backward(squares(model, comm.rank))
    finally:
        hooks.remove()


def test_a_backward_pass_that_fails_on_one_rank_is_reported(ranks: Pool) -> None:
    """Half of its gradients are gone; the next pass must not be mixed with what the others wait for."""
    for error in ranks(2).run_expecting_errors(fail_on_one):
        assert isinstance(error, MismatchError), error
        assert "gradients[" in str(error)


def frozen_and_thawed(comm: Communicator) -> None:
    """First the head alone is trained, then the body alone, then everything, then a part without zeroing."""

    def make(head: bool, body: bool) -> nn.Sequential:
        model = make_model()
        model[4].requires_grad_(head)
        model[:4].requires_grad_(body)
        return model

    model = make(True, False)
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    for head, body in ((True, False), (False, True), (True, True), (False, True)):
        model[4].requires_grad_(head)
        model[:4].requires_grad_(body)
        for _ in range(2):
            model.zero_grad()
            torch.autograd.backward(squares(model, comm.rank))
            assert_gradients(model, expected(comm, squares, lambda h=head, b=body: make(h, b)), comm)
    hooks.remove()
    model.requires_grad_(True)
    torch.autograd.backward(squares(model, comm.rank))


def test_parameters_are_frozen_and_thawed(ranks: Pool) -> None:
    ranks(2).run(frozen_and_thawed)


def no_loss_on_one_rank(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    if comm.rank == 0:
        torch.autograd.backward(squares(model, 0))
    else:
        hooks.synchronize()
    assert_gradients(model, expected(comm, lambda m, r: squares(m, 0) * (r == 0)), comm)
    with hooks.no_sync():
        model.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))
    hooks.synchronize()
    assert_gradients(model, expected(comm, squares), comm)
    hooks.remove()


def test_synchronize_reduces_without_a_backward_pass(ranks: Pool) -> None:
    ranks(2).run(no_loss_on_one_rank)


def two_models(comm: Communicator) -> None:
    """A backward pass through both; what each rank leaves out makes the passes begin in different order."""
    models = [make_model(k, inputs) for k, inputs in enumerate((6, 3))]
    hooks = [multiring.torch.register_gradient_hooks(model, comm, **SMALL) for model in models]

    def loss(chain: nn.Sequential, rank: int) -> Tensor:
        first, second = chain[:5], chain[5:]
        if rank == 0:
            return second(first(draw(rank))).sum()
        return (first[:3](draw(rank)) ** 2).sum() + (second[:1](draw(rank)[:, :3]) ** 2).sum()

    for _ in range(3):
        for model in models:
            model.zero_grad()
        chain = nn.Sequential(*models[0], *models[1])
        torch.autograd.backward(loss(chain, comm.rank))
        wanted = expected(comm, loss, lambda: nn.Sequential(*make_model(0, 6), *make_model(1, 3)))
        assert_gradients(chain, wanted, comm)
    for hook in hooks:
        hook.remove()


def test_two_models_with_hooks_of_their_own(ranks: Pool) -> None:
    ranks(2).run(two_models)


def refuse_what_cannot_work(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm)
    with pytest.raises(UsageError, match=r"'0\.weight' already has gradient hooks"):
        multiring.torch.register_gradient_hooks(model, comm)
    with pytest.raises(UsageError, match="'weight' already has gradient hooks"):
        multiring.torch.register_gradient_hooks(model[2], comm)
    with pytest.raises(UsageError, match="create_graph=True"):
        torch.autograd.backward(squares(model, 0), create_graph=True)
    model.zero_grad()
    with pytest.raises(UsageError, match=r"'4.bias' has become torch.float32 \(3,\), it was torch.float64"):
        torch.autograd.backward((model.float()(draw(0).float()) ** 2).mean())
    hooks.remove()
    with pytest.raises(UsageError, match="have been removed"):
        hooks.synchronize()
    with pytest.raises(UsageError, match="no parameters"):
        multiring.torch.register_gradient_hooks(nn.Tanh(), comm)
    odd = nn.ParameterList([nn.Parameter(torch.zeros(2).to(torch.float8_e5m2))])
    with pytest.raises(UsageError, match=r"dtype torch\.float8"):
        multiring.torch.register_gradient_hooks(odd, comm)
    with pytest.raises(UsageError, match="on device meta"):
        multiring.torch.register_gradient_hooks(nn.Linear(2, 2, device="meta"), comm)
    with pytest.raises(UsageError, match="postscale is 0"):
        multiring.torch.register_gradient_hooks(make_model(), comm, postscale=0.0)
    multiring.torch.register_gradient_hooks(make_model(), comm).remove()


@pytest.mark.parametrize("size", [2])
def test_refused(ranks: Pool, size: int) -> None:
    ranks(size).run(refuse_what_cannot_work)


def differ(comm: Communicator, what: str) -> None:
    model = make_model()
    options: dict[str, Any] = {}
    if comm.rank == 1:
        if what == "strides":
            model[2].weight = nn.Parameter(model[2].weight.detach().t())
        elif what == "frozen":
            model[2].weight.requires_grad_(False)
        else:
            options["bucket_bytes"] = 1 << 20
    multiring.torch.register_gradient_hooks(model, comm, **options)


@pytest.mark.parametrize(
    ("what", "text"),
    [("strides", "'2.weight' .*strides"), ("frozen", "'2.weight'"), ("options", "'options'.*bucket_bytes")],
)
def test_models_that_differ_in_small_things(ranks: Pool, what: str, text: str) -> None:
    for error in ranks(2).run_expecting_errors(differ, what):
        assert isinstance(error, MismatchError)
        assert re.search(text, str(error)), error


def drop_everything(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    torch.autograd.backward(squares(model, comm.rank))
    dropped = [weakref.ref(hooks), weakref.ref(model), weakref.ref(hooks._slots.reducer._memory)]
    del model, hooks
    gc.collect()
    assert [ref() for ref in dropped] == [None, None, None]


@pytest.mark.parametrize("size", [1, 2])
def test_a_dropped_model_releases_its_buckets(ranks: Pool, size: int) -> None:
    ranks(size).run(drop_everything)


def dropped_handle(comm: Communicator) -> None:
    model = make_model()
    multiring.torch.register_gradient_hooks(model, comm)
    gc.collect()
    torch.autograd.backward(squares(model, comm.rank))
    assert_gradients(model, expected(comm, squares), comm)


def test_hooks_work_without_their_handle(ranks: Pool) -> None:
    ranks(2).run(dropped_handle)


def sum_and_scale(comm: Communicator) -> None:
    size = comm.size
    for options, factor in (
        ({"average": False}, size),
        ({"prescale": 0.5, "postscale": 4.0}, 2.0),
        ({"average": False, "prescale": 2.0**-20}, size * 2.0**-20),
        ({"prescale": -1e6, "postscale": 1e-3}, -1e3),
    ):
        model = make_model()
        hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL, **options)  # type: ignore[arg-type]
        for step in range(2):
            model.zero_grad()
            with hooks.no_sync() if step == 0 else nullcontext():
                torch.autograd.backward(model[0](draw(1)).sum() * 0.0)
            torch.autograd.backward(squares(model, comm.rank))
            assert_gradients(model, [g * factor for g in expected(comm, squares)], comm)
        hooks.remove()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sum_and_scales(ranks: Pool, size: int) -> None:
    ranks(size).run(sum_and_scale)


def nothing_happens(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    torch.autograd.backward(squares(model, 0))
    with hooks.join():
        pass
    hooks.synchronize()
    hooks.remove()


def test_one_rank_has_no_hooks(ranks: Pool) -> None:
    ranks(1).run(nothing_happens)
