"""What would give wrong results silently in JAX: it is right, or an error on every rank."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multiring.jax as mj
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.adapters.jax.support import errors_break_the_queue
from tests.on_ranks import Pool, all_raise

total = jax.jit(mj.allreduce)


def average(x: Any) -> Any:
    return mj.allreduce(x, "average")


BOTH_CALLS = r"(?s)(?=.*\(#1 of program at test_jax_correctness\.py:).*\(#2 of program"


@all_raise(
    MismatchError,
    "of those that all submit in one order: rank 0 '",
    how={"one helper": BOTH_CALLS, "one compiled function": r"\(#2 of program", "trees": BOTH_CALLS},
)
def test_a_loop_that_is_longer_on_one_rank_is_an_error_at_once(comm: Communicator, how: str) -> None:
    """A loop that is longer on one rank, and behind it a call that has nothing to do with it."""
    call = {"one helper": average, "one compiled function": total, "trees": mj.average_gradients}[how]

    @jax.jit
    def program(count: Any, x: Any) -> Any:
        def body(carry: Any) -> Any:
            return carry[0] + 1, call(carry[1]) * 0 + 1

        _, looped = jax.lax.while_loop(lambda carry: carry[0] < count, body, (0, x))
        return looped, call(100 * x)

    with errors_break_the_queue(comm):
        jax.block_until_ready(program(1 + comm.rank, jnp.ones(3)))


@all_raise(MismatchError, r"allreduce \(at test_jax_correctness\.py:")
def test_a_python_loop_that_is_longer_on_one_rank_is_an_error_at_once(comm: Communicator) -> None:
    with errors_break_the_queue(comm):
        for _ in range(1 + comm.rank):
            mj.allreduce(jnp.ones(3))
        jax.block_until_ready(mj.allreduce(100 * jnp.ones(3)))


APART = {
    "each step a program": "rank 0 submitted it in step 4; rank 1 submitted it in step 5",
    "all steps a program": "rank 0 submitted it in step 4; rank 1 submitted it in step 5",
    "a named step": None,
    "a loop": "rank 0 submitted it in step 1; rank 1 submitted it in step 2",
}


@all_raise(MismatchError, "all ranks have to enter it in the same steps. multiring.jax.distribute", how=APART)
def test_steps_that_ranks_skip_apart(comm: Communicator, how: str) -> None:
    """As many steps on each rank, and the same weights: the gradients of another step would meet them."""
    name = "gradients" if how == "a named step" else None  # all that is compared then
    optimizer = optax.apply_if_finite(mj.distribute(optax.sgd(1.0), check_every=0, name=name), 9)
    rows = jnp.where(jnp.arange(8)[:, None] == 4 - comm.rank, jnp.nan, 1.0) * jnp.eye(8)

    def step(carry: Any, gradient: Any) -> Any:
        changes, state = optimizer.update(gradient, carry[1], carry[0])
        return (optax.apply_updates(carry[0], changes), state), None

    carry = jnp.zeros(8), optimizer.init(jnp.zeros(8))
    with errors_break_the_queue(comm):
        if how == "a loop":
            looped = jax.jit(lambda n, x: jax.lax.fori_loop(0, n, lambda _, x: average(x), x))
            for count in ((2, 1), (1, 2))[comm.rank]:
                carry = jax.block_until_ready(looped(count, carry[0])), None
        elif how == "all steps a program":
            carry = jax.block_until_ready(jax.jit(lambda carry: jax.lax.scan(step, carry, rows))(carry)[0])
        else:
            one = jax.jit(step)
            for row in rows:
                carry = jax.block_until_ready(one(carry, row)[0])
        np.testing.assert_array_equal(carry[0], [-1, -1, -1, -0.5, -0.5, -1, -1, -1])


def test_places_are_the_same_whatever_a_rank_compiles(comm: Communicator) -> None:
    """One rank compiles for other shapes, runs other code before, and makes a call of a group of its own."""
    alone = comm.split(comm.rank)

    @jax.jit
    def program(batch: Any, x: Any) -> Any:
        for _ in range(comm.rank):
            batch = mj.allreduce(batch, comm=alone) * 2  # a group that the other rank is not in
        grow = jax.grad(lambda x: jnp.sin(average(x)).sum() + batch.sum())(x)
        again = jax.checkpoint(lambda x: total(x) + average(x))
        mapped = jax.vmap(again)(jnp.stack([grow, x]))
        return jax.lax.scan(lambda carry, y: (total(carry), average(y)), x, mapped)

    x = jnp.arange(3.0) + comm.rank
    first = program(jnp.ones(4), x)
    second = program(jnp.ones(4 + comm.rank), x)  # compiled anew on one rank only
    jax.tree.map(np.testing.assert_array_equal, first, second)
    ahead = program.lower(jnp.ones(2 + comm.rank), x).compile()
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, first, ahead(jnp.ones(2 + comm.rank), x))
    mean = np.arange(3.0) + (comm.size - 1) / 2
    np.testing.assert_allclose(first[0], mean * comm.size * comm.size, rtol=1e-6)


def unnamed_in_two_threads(comm: Communicator, where: str) -> None:
    """Nothing orders them: one thread's call would meet the other's."""
    group = comm.split(0)
    own = [comm.split(0) for _ in range(2)]

    def reduce(place: int) -> Any:
        name = f"of thread {place}" if where == "names" else None
        members = own[place] if where == "communicators" else group
        function = partial(mj.allreduce, comm=members, name=name)
        both.wait()
        return (jax.jit(function) if where == "compiled" else function)(jnp.full(2, 1.0 + place))

    both = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        for place, found in enumerate(pool.map(reduce, range(2))):
            np.testing.assert_array_equal(found, comm.size * (1.0 + place))


@pytest.mark.parametrize("where", ["outside", "compiled"])
def test_calls_without_names_belong_to_one_thread(ranks: Pool, where: str) -> None:
    errors = ranks(2).run_expecting_errors(unnamed_in_two_threads, where)
    assert any("give each thread a communicator of its own" in str(error) for error in errors), errors
    assert all(isinstance(error, Exception) for error in errors)


@pytest.mark.parametrize("name", [None, "gradients"])
def test_a_compiled_function_belongs_to_a_living_thread(comm: Communicator, name: str | None) -> None:
    """It is traced once: the second thread only runs it."""
    group = comm.split(0)

    @jax.jit
    def total(x: Any) -> Any:
        return mj.allreduce(x, comm=group, name=name) + mj.allreduce(2 * x, comm=group, name=name)

    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            np.testing.assert_array_equal(pool.submit(total, jnp.ones(2)).result(), 3 * comm.size)
    np.testing.assert_array_equal(total(jnp.ones(2)), 3 * comm.size)
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="belongs to thread 'MainThread'"):
        pool.submit(total, jnp.ones(2)).result()


@pytest.mark.parametrize("where", ["names", "communicators"])
def test_threads_with_names_or_communicators_of_their_own(comm: Communicator, where: str) -> None:
    unnamed_in_two_threads(comm, where)


def test_a_name_joins_calls_of_different_places(comm: Communicator) -> None:
    """Calls that belong together need a name where they are written in different places."""
    if comm.rank == 0:
        found = mj.broadcast(jnp.arange(3.0), name="start")
    else:
        found = mj.broadcast(jnp.zeros(3), name="start")
    np.testing.assert_array_equal(found, np.arange(3.0))


def test_values_that_do_not_fit_are_refused(comm: Communicator) -> None:
    with jax.enable_x64(False):
        for value in (
            np.array([2**40]),
            np.uint64(2**40),
            np.array([-(2**33), 1]),
            np.array([1e300, np.inf]),
        ):
            with pytest.raises(UsageError, match="'allreduce' is .*64 with values from .* cannot hold them"):
                mj.allreduce(value)
            with pytest.raises(UsageError, match="'allgather' is"):
                mj.allgather(value)
            with pytest.raises(UsageError, match="'a' is"):
                mj.average_gradients({"a": value})
            with pytest.raises(UsageError, match="'b' is"):
                jax.jit(lambda value=value: mj.grouped_allreduce({"b": value}))()
        for fits in (np.array([2**30 - 1, -5]), np.array([np.inf, 1.5])):
            np.testing.assert_array_equal(mj.allreduce(fits), fits * comm.size)
        large = {"numpy": np.array([2**40 + comm.rank]), "number": 2**41 + comm.rank, "float": 1e300}
        assert mj.broadcast_parameters(large) == {"numpy": np.array([2**40]), "number": 2**41, "float": 1e300}


def test_weak_types_are_those_of_the_root(comm: Communicator) -> None:
    """Every rank has the types of the root, whether it lacked them or had more of them."""
    weak, strong = jnp.asarray(0.5), jnp.asarray(0.5, jnp.result_type(float))
    tree = {"weak": weak, "strong": strong} if comm.rank == 1 else {"weak": strong, "strong": weak}
    found = mj.broadcast_parameters(tree, 1)
    assert (found["weak"].weak_type, found["strong"].weak_type) == (True, False)
    half = jnp.ones(2, jnp.bfloat16)
    assert (half * found["weak"]).dtype == jnp.bfloat16
    assert (half * found["strong"]).dtype == strong.dtype


def helper(x: Any) -> Any:
    return mj.allreduce(x)


def _first() -> Any:
    def step(x: Any) -> Any:
        return helper(x) * 2

    return step


def _second() -> Any:
    def step(x: Any) -> Any:
        return helper(x) * 3

    return step


def _scanned(step: Any) -> Any:
    """The collective in a loop, whose body both programs share."""
    return jax.lax.scan(shared_body, step, jnp.zeros(2))[0]


def shared_body(carry: Any, _: Any) -> Any:
    return helper(carry), None


def _first_loop() -> Any:
    def step(x: Any) -> Any:
        return _scanned(x) * 2

    return step


def _second_loop() -> Any:
    def step(x: Any) -> Any:
        return _scanned(x) * 3

    return step


def _of_sum(function: Any) -> Any:
    return functools.wraps(function)(lambda x: function(x).sum())


# fmt: off
LAMBDAS = lambda x: helper(x) * 2, lambda x: helper(x) * 3
DIRECT = lambda x: mj.allreduce(x) * 2, lambda x: mj.allreduce(x) * 3
# fmt: on
PAIRS = {
    "two functions of one name": (_first(), _second()),
    "with a loop that they share": (_first_loop(), _second_loop()),
    "two lambdas on a line": LAMBDAS,
    "with the collective in them": DIRECT,
    "with a loop in grad": tuple(jax.grad(_of_sum(make())) for make in (_first_loop, _second_loop)),
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("pair", ["two lambdas on a line", "with the collective in them"])
def test_lambdas_on_one_line_are_told_apart(comm: Communicator, pair: str, compiled: bool) -> None:
    """Outside of compiled functions by the column of the call alone: a helper may be called anywhere."""
    function = PAIRS[pair][comm.rank]
    call = jax.jit(function) if compiled else function
    if not compiled and pair == "two lambdas on a line":
        np.testing.assert_array_equal(call(jnp.ones(3)), comm.size * (2.0 + comm.rank) * np.ones(3))
        return
    text = r"test_jax_correctness\.py:\d+:\d+"
    with pytest.raises(MismatchError, match=text), errors_break_the_queue(comm):
        jax.block_until_ready(call(jnp.ones(3)))


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "lambdas" not in pair and "in them" not in pair])
def test_functions_of_one_name_are_told_apart(comm: Communicator, pair: str) -> None:
    """Their collectives stand on one line of a helper."""
    function = PAIRS[pair][comm.rank]
    text = r"in the function of test_jax_correctness\.py:"
    with pytest.raises(MismatchError, match=text), errors_break_the_queue(comm):
        jax.block_until_ready(jax.jit(function)(jnp.ones(3)))


def test_one_function_may_be_called_from_other_places(comm: Communicator) -> None:
    """Compiled at another line on each rank, behind a wrapper on one, and in a branch of the rank's own."""

    def logged(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(x: Any) -> Any:
            return function(x)

        return wrapper

    def choose(x: Any) -> Any:
        if comm.rank == 0:
            return helper(x)
        return helper(x)

    step, ones = _first(), jnp.ones(3)
    if comm.rank == 0:
        found = jax.jit(step)(ones), jax.jit(logged(step))(ones), jax.jit(choose)(ones)
    else:
        found = tuple(jax.jit(function)(ones) for function in (step, step, choose))
    for value, factor in zip(found, (2, 2, 1), strict=True):
        np.testing.assert_array_equal(value, comm.size * factor * np.ones(3))
