"""The nets that a solver's prototxt asks for: one to train and any number to test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from multiring.models.caffe.layer import Context
from multiring.models.caffe.net import Net
from multiring.models.caffe.prototxt import Location, read
from multiring.models.caffe.schema import TEST, TRAIN, NetParameter, message

__all__ = ["test_nets", "train_net"]

NetState: Any = message("NetState")
Source = tuple[Any, Location]


def train_net(param: Any, location: Location, context: Context) -> Net:
    """The net to train.

    Args:
        param: The `SolverParameter`.
        location: Where it stands.
        context: What the layers have in common.

    Raises:
        PrototxtError: None or several are given, or the net is wrong.
    """
    given = [n for n in ("net", "net_param", "train_net", "train_net_param") if param.HasField(n)]
    if len(given) != 1:
        found = f"there are {' and '.join(given)}" if given else "there is none"
        raise location.error(
            f"one of net, net_param, train_net and train_net_param is needed; {found}", *given
        )
    source = _source(param, location, given[0])
    return _build(source, TRAIN, param.train_state, replace(context, phase=TRAIN))


def test_nets(param: Any, location: Location, context: Context) -> list[Net]:
    """The nets to test with: those of `test_net_param`, of `test_net`, then `net` as often as there are
    values of `test_iter` left.

    Raises:
        PrototxtError: Numbers of nets, `test_iter` and `test_state` do not fit.
    """
    sources = [
        _source(param, location, name, number)
        for name in ("test_net_param", "test_net")
        for number in range(len(getattr(param, name)))
    ]
    general = next((name for name in ("net", "net_param") if param.HasField(name)), None)
    missing = len(param.test_iter) - len(sources)
    if missing < 0 or (missing and general is None):
        raise location.error(
            f"{len(sources)} test nets have {len(param.test_iter)} values of test_iter", "test_iter"
        )
    if general is not None:
        sources += [_source(param, location, general) for _ in range(missing)]
    if param.test_state and len(param.test_state) != len(sources):
        raise location.error(
            f"{len(sources)} test nets have {len(param.test_state)} values of test_state", "test_state"
        )
    if sources and param.test_interval < 1:
        raise location.error("test nets need a test_interval of at least 1", "test_interval")
    states = list(param.test_state) or [None] * len(sources)
    # Test nets take over the blobs of the train net, so what their fillers draw does not matter.
    return [
        _build(source, TEST, state, replace(context, phase=TEST, comm=None))
        for source, state in zip(sources, states, strict=True)
    ]


def _source(param: Any, location: Location, name: str, number: int | None = None) -> Source:
    """A net of a field that holds it or the path of its file."""
    value = getattr(param, name) if number is None else getattr(param, name)[number]
    where = location.find(name, number or 0)
    if name.endswith("_param"):
        net = NetParameter()
        net.CopyFrom(value)
        return net, where
    path = Path(value)
    if not path.exists() and not path.is_absolute() and (Path(location.file).parent / path).exists():
        path = Path(location.file).parent / path
    if not path.exists():
        raise where.error(
            f"net {value!r} is neither in the working directory nor beside the solver's prototxt"
        )
    net, where = read(path, NetParameter)
    return net, where


def _build(source: Source, phase: int, state: Any, context: Context) -> Net:
    param, location = source
    merged = NetState(phase=phase)
    merged.MergeFrom(param.state)
    if state is not None:
        merged.MergeFrom(state)
    param.state.CopyFrom(merged)
    return Net.from_param(param, location, replace(context, phase=merged.phase))
