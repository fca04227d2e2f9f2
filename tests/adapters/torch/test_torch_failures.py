"""What goes wrong with gradient hooks of Torch, what is refused, and what is left afterwards."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multiring.torch
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.adapters.torch.support import SMALL, Pool, assert_gradients, draw, expected, make_model, squares
from tests.support import start_job


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
    with pytest.raises(UsageError, match=r"'weight' is lazy"):
        multiring.torch.register_gradient_hooks(nn.LazyLinear(2), comm)
    with pytest.raises(UsageError, match="on device meta"):
        multiring.torch.register_gradient_hooks(nn.Linear(2, 2, device="meta"), comm)
    with pytest.raises(UsageError, match="postscale is 0"):
        multiring.torch.register_gradient_hooks(make_model(), comm, postscale=0.0)
    multiring.torch.register_gradient_hooks(make_model(), comm).remove()


@pytest.mark.parametrize("size", [2])
def test_refused(ranks: Pool, size: int) -> None:
    ranks(size).run(refuse_what_cannot_work)


def replace_in_a_hook(comm: Communicator, how: str, bucket_bytes: int) -> None:
    """By a hook that runs after ours, when the gradient is on its way or about to be."""
    model = make_model()
    multiring.torch.register_gradient_hooks(
        model, comm, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes
    )
    model[2].weight.register_post_accumulate_grad_hook(
        lambda p: setattr(p, "grad", None if how == "taken away" else p.grad.clamp(-1, 1))
    )
    torch.autograd.backward(squares(model, comm.rank))


@pytest.mark.parametrize(
    ("how", "bucket_bytes"), [("taken away", 1 << 20), ("taken away", 64), ("replaced", 64)]
)
def test_gradients_that_another_hook_replaces_are_refused(ranks: Pool, how: str, bucket_bytes: int) -> None:
    for error in ranks(2).run_expecting_errors(replace_in_a_hook, how, bucket_bytes):
        assert isinstance(error, UsageError), error
        assert "the gradient of '2.weight' was replaced or taken away" in str(error)


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


KILLED = """
import os, signal, time
import multiring.torch, torch

comm = multiring.init()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
multiring.torch.register_gradient_hooks(model, comm, bucket_bytes=1 << 14, first_bucket_bytes=1 << 12)
calls = 0

def die(_):
    global calls
    calls += 1
    if comm.rank == 1 and calls == 3:
        comm.send(torch.zeros(1), 0)  # rank 0 measures from here
        os.kill(os.getpid(), signal.SIGKILL)

model[1].weight.register_hook(die)
start = None
try:
    while True:
        if comm.rank == 0 and calls == 2:
            comm.recv(1)
            start = time.monotonic()
        model.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
except multiring.MultiringError as error:
    seconds = time.monotonic() - start
    path = os.path.join(os.environ["TEST_DIRECTORY"], "seen")
    with open(path + ".new", "w") as file:
        file.write(f"{type(error).__name__} {seconds:.3f} {error}")
    os.rename(path + ".new", path)
    raise
"""


def test_a_killed_rank_is_reported_within_two_seconds() -> None:
    with start_job(2, KILLED) as job:
        name, seconds, text = job.wait_for_file("seen").split(" ", 2)
        assert name == "PeerLostError", text
        assert float(seconds) < 2.0
        assert "rank 1" in text
        assert "gradients[" in text
        job.finish()
        job.assert_nothing_left()


def replaced_part(comm: Communicator) -> None:
    """The old head is gone, its hooks with it; the new one is not known; the rest goes on, unless checked."""
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, check_every=0, **SMALL)
    torch.autograd.backward(squares(model, comm.rank))
    model[4] = nn.Linear(8, 2).double()
    gc.collect()
    for _ in range(2):
        model.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))
        bits = comm.allgather_object(
            [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
        )
        assert bits[0][:4] == bits[1][:4]
        assert bits[0][4:] != bits[1][4:]
    hooks.remove()


def test_a_part_of_the_model_is_replaced(ranks: Pool) -> None:
    ranks(2).run(replaced_part)
