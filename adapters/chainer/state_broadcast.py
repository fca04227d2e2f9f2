"""State from one rank to all."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import chainer
from multiring import Communicator
from multiring.chainer.arrays import empty, is_array, on_device, ordered, to_device, to_host
from multiring.chainer.groups import Group, plain_communicator
from multiring.chainer.parameters import named_parameters
from multiring.objects import pickled
from multiring.state import broadcast
from multiring.state.buffer_sync import sync_arrays
from multiring.types import BufferMode

__all__ = [
    "broadcast_arrays",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "parameter_arrays",
    "state_digest",
    "sync_buffers",
    "training_state",
]

# What dynamic loss scaling has found out.
_LOSS_SCALING = ("_loss_scale", "_loss_scaling_isnan_ever")


def broadcast_parameters(
    link_or_arrays: chainer.Link | Mapping[str, Any], root: int = 0, comm: Group = None
) -> None:
    """Overwrite the state of all ranks with that of `root`, in place. Collective.

    Args:
        link_or_arrays: A link: all its parameters and its persistent values, such as the running statistics
            of batch normalisation. Or arrays by name, of any dtype, shape and strides.
        root: Rank whose values everyone gets.
        comm: Ranks that take part; the world by default.

    Raises:
        UsageError: `root` is not a rank.
        MismatchError: The ranks have different names, shapes or dtypes, or have initialised other parameters.
    """
    if not isinstance(link_or_arrays, chainer.Link):
        broadcast_arrays(link_or_arrays, root, comm)
        return
    arrays = parameter_arrays(link_or_arrays)
    others: dict[str, tuple[chainer.Link, str]] = {}
    for path, link in link_or_arrays.namedlinks():
        for name in sorted(link._persistent):
            value = getattr(link, name)
            if is_array(value) and not isinstance(value, np.generic) and not _is_constant(value):
                arrays[f"{path}/{name}".lstrip("/")] = value
            else:
                others[f"{path}/{name}"] = (link, name)
    broadcast_arrays(arrays, root, comm)
    forget_copies(link_or_arrays)
    values = [getattr(link, name) for link, name in others.values()]
    received = plain_communicator(comm).broadcast_object(values, root)
    for (link, name), value in zip(others.values(), received, strict=True):
        if _is_constant(getattr(link, name)):
            value.setflags(write=False)
        setattr(link, name, value)


def forget_copies(link: chainer.Link) -> None:
    """Have update rules make the float32 copies of float16 parameters (`use_fp32_update`) anew: they hold the
    values before. On all ranks, since those of the root have more digits."""
    for parameter in named_parameters(link).values():
        if getattr(parameter.update_rule, "_fp32_param", None) is not None:
            parameter.update_rule._fp32_param = None


def parameter_arrays(link: chainer.Link) -> dict[str, Any]:
    """Arrays of the initialised parameters, by name."""
    return {name: p.array for name, p in named_parameters(link).items() if p.is_initialized}


def broadcast_arrays(arrays: Mapping[str, Any], root: int = 0, comm: Group = None) -> None:
    """Overwrite arrays, of NumPy or CuPy, with those of `root`. Collective; see `broadcast_parameters`."""
    # Arrays without gaps are received where they are; others by way of a copy.
    staged = _together(arrays)
    broadcast.broadcast_arrays(plain_communicator(comm), staged, root)
    _take_over(arrays, staged)


def sync_buffers(link: chainer.Link, comm: Communicator, mode: BufferMode, active: Sequence[bool]) -> None:
    """Make the buffers of all ranks the same: see `multiring.state.buffer_sync.sync_arrays`. Collective."""
    arrays = _buffers(link) if mode != "local" else {}
    staged = _together(arrays)
    sync_arrays(comm, staged, mode, active)
    _take_over(arrays, staged)


def training_state(optimizer: chainer.Optimizer, *, buffers: bool) -> Iterator[tuple[str, object]]:
    """What has to be the same on all ranks: hyperparameters and hooks of an optimizer and its update rules,
    parameters, and buffers if asked for."""
    yield "optimizer", type(optimizer).__name__
    yield "updates of the optimizer", optimizer.t
    yield "loss scale", optimizer._loss_scale
    yield from _settings("optimizer", optimizer)
    for name, parameter in named_parameters(optimizer.target).items():
        rule = parameter.update_rule
        if rule is not None:
            yield f"update rule of {name}", (type(rule).__name__, rule.enabled)
            yield from _settings(f"update rule of {name}", rule)
        if parameter.is_initialized:
            yield name, to_host(parameter.array)
            copy = getattr(rule, "_fp32_param", None)
            if copy is not None and copy.is_initialized:
                yield f"float32 copy of {name}", to_host(copy.array)
    for name, array in _buffers(optimizer.target).items() if buffers else ():
        yield name, to_host(array)


def broadcast_optimizer_state(optimizer: Any, root: int = 0, comm: Group = None) -> None:
    """Give all ranks the optimizer state of `root`: counts of updates and epochs, update rules' states, and
    the scale of dynamic loss scaling.

    Hyperparameters are not part of it, as they are not part of Chainer's snapshots either. What cannot be
    pickled of an update rule's state (a lock, a handle) stays each rank's own, with a warning. Collective.

    Args:
        optimizer: Optimizer that is set up with the same link on every rank, wrapped or not.
        root: Rank whose state everyone gets.
        comm: Ranks that take part; the world by default.

    Raises:
        UsageError: `root` is not a rank.
    """
    plain = plain_communicator(comm)
    broadcast.check_root(plain, root)
    if plain.size == 1:
        return
    optimizer = getattr(optimizer, "actual_optimizer", optimizer)
    forget_copies(optimizer.target)
    rules = {
        name: parameter.update_rule
        for name, parameter in named_parameters(optimizer.target).items()
        if parameter.update_rule is not None
    }
    state = None
    if plain.rank == root:
        own = _own_entries(plain.rank, rules)
        found = {name: (rule.t, _forms(rule.state, own[name]), own[name]) for name, rule in rules.items()}
        scaling = {key: value for key, value in vars(optimizer).items() if key in _LOSS_SCALING}
        state = (optimizer.t, optimizer.epoch, scaling, found)
    received = plain.broadcast_object(state, root, name="state of the optimizer")
    forms = {name: values or {} for name, (_, values, _) in received[-1].items()}
    if plain.rank != root:
        _take_state(optimizer, rules, received)
    arrays = {
        f"{name}: {key}": rules[name].state[key]
        for name, values in forms.items()
        for key, value in values.items()
        if isinstance(value, _Form)
    }
    broadcast_arrays(arrays, root, plain)


def _take_state(optimizer: Any, rules: Mapping[str, Any], received: Any) -> None:
    """Take over the root's state, with memory for its arrays, where the parameters lie."""
    optimizer.t, optimizer.epoch, scaling, found = received
    if optimizer._loss_scaling_is_dynamic:
        vars(optimizer).update(scaling)
    parameters = named_parameters(optimizer.target)
    for name, (count, values, kept) in found.items():
        rule, parameter = rules[name], parameters[name]
        if kept and rule.state is None:
            rule._init_states(parameter)
        mine = {key: rule.state[key] for key in kept if key in rule.state}
        device = on_device(parameter.array)
        rule.t, rule._state = count, None if values is None else _placed(values, device) | mine


def state_digest(optimizer: chainer.Optimizer) -> str:
    """Hash of all initialised parameters, and of what their update rules keep."""
    digest = hashlib.blake2b(str(optimizer.t).encode())
    for name, parameter in named_parameters(optimizer.target).items():
        if not parameter.is_initialized:
            continue
        kept = getattr(parameter.update_rule, "state", None) or {}
        for key, value in [("", parameter.array), *sorted(kept.items())]:
            digest.update(f"{name} {key} ".encode())
            digest.update(
                to_host(value).reshape(-1).view(np.uint8).data if is_array(value) else _shown(value)
            )
    return digest.hexdigest()


def _shown(value: object) -> bytes | memoryview:
    """What tells a value from another one on any rank. Those that cannot be pickled count as equal."""
    text = repr(value)
    if " at 0x" not in text:  # an address
        return text.encode()
    data, failure = pickled(value)
    return data.data if failure is None else type(value).__name__.encode()


def _own_entries(rank: int, rules: Mapping[str, Any]) -> dict[str, list[str]]:
    """The keys of what cannot be pickled of each update rule's state."""
    result: dict[str, list[str]] = {name: [] for name in rules}
    reasons = []
    for name, rule in rules.items():
        for key, value in (rule.state or {}).items():
            failure = None if is_array(value) else pickled(value)[1]
            if failure is not None:
                result[name].append(key)
                reasons.append(f"state {key!r} of the update rule of '{name}' cannot be pickled ({failure})")
    if reasons:
        more = f", and {len(reasons) - 1} more like it" if len(reasons) > 1 else ""
        warnings.warn(
            f"rank {rank}: {reasons[0]}{more}: each rank keeps its own. Make it the same on every rank, or "
            "define how it is pickled (__reduce__)",
            stacklevel=3,
        )
    return result


class _Form(NamedTuple):
    """Stands for an array, which travels by itself."""

    shape: tuple[int, ...]
    dtype: str


def _forms(state: Mapping[str, Any] | None, omitted: Sequence[str]) -> dict[str, Any] | None:
    if state is None:
        return None
    return {key: _form(value) for key, value in state.items() if key not in omitted}


def _form(value: Any) -> Any:
    is_form = is_array(value) and not isinstance(value, np.generic) and not value.dtype.hasobject
    return _Form(tuple(value.shape), value.dtype.str) if is_form else value


def _placed(values: Mapping[str, Any], device: bool) -> dict[str, Any]:
    return {k: empty(v.shape, v.dtype, device) if isinstance(v, _Form) else v for k, v in values.items()}


def _is_constant(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not value.flags.writeable


def _buffers(link: chainer.Link) -> dict[str, Any]:
    """The persistent values that are arrays of numbers, by name. Those of unsigned integers are left out:
    they may be states of random number generators, which each rank has of its own. So are read-only ones."""
    return {
        f"{path}/{name}".lstrip("/"): value
        for path, owner in link.namedlinks()
        for name in sorted(owner._persistent)
        if is_array(value := getattr(owner, name))
        and not isinstance(value, np.generic)
        and value.dtype.kind in "bifc"
        and not _is_constant(value)
    }


def _together(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays in C order; on the device if one of them is there, since they travel together."""
    device = any(on_device(array) for array in arrays.values())
    return {name: to_device(ordered(array), device) for name, array in arrays.items()}


def _take_over(arrays: Mapping[str, Any], staged: Mapping[str, Any]) -> None:
    """Copy what has arrived where it was not received in place."""
    for name, array in arrays.items():
        found = staged[name] if on_device(array) else to_host(staged[name])
        if found is not array:
            array[...] = found.reshape(array.shape)


def _settings(owner: str, found: Any) -> Iterator[tuple[str, object]]:
    """Hyperparameters and hooks of an optimizer or of an update rule. Those that a rule takes from its
    optimizer are the optimizer's."""
    hyperparameters = getattr(found, "hyperparam", None)
    own = {} if hyperparameters is None else vars(hyperparameters)
    for name in sorted(own.keys() - {"_parent"}):
        yield f"{name} of the {owner}", own[name]
    for when in ("_pre_update_hooks", "_post_update_hooks"):
        for name, hook in (getattr(getattr(found, "_hookable", None) or found, when, None) or {}).items():
            # A hook of the program's own may keep what differs: a clock, a path.
            shown = vars(hook) if type(hook).__module__.startswith("chainer.optimizer_hooks") else {}
            values = {k: v for k, v in shown.items() if isinstance(v, str | int | float)}
            yield f"hook {name} of the {owner}", f"{type(hook).__name__} {sorted(values.items())}"
