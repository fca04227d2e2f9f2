"""A net as it is built: layers chosen by phase, inputs as layers, copies where a blob is read twice, and
which of the layers run backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multiring.models.caffe.layer import LAYERS, Layer
from multiring.models.caffe.prototxt import Location
from multiring.models.caffe.schema import LayerParameter

__all__ = ["BackwardPlan", "Entry", "backward_plan", "entries"]


@dataclass(frozen=True)
class Entry:
    """A layer to build: its parameter and where it stands."""

    param: Any
    location: Location


def entries(net: Any, location: Location) -> list[Entry]:
    """The layers of a `NetParameter` for its `state`, with copies of their parameters.

    Raises:
        PrototxtError: A rule is contradictory, a layer reads a blob that no layer before it gives, or
            `loss_weight` does not fit the tops.
    """
    chosen = _inputs(net, location)
    for number, layer in enumerate(net.layer):
        where = location.find("layer", number)
        if _is_included(layer, net.state, where):
            param = LayerParameter()
            param.CopyFrom(layer)
            _check_weights(param, where)
            chosen.append(Entry(param, where))
    result = _with_splits(chosen)
    for entry in result:
        # As in Caffe, only now: a loss with the default weight gets no copy for the layer that reads it, but
        # has the gradient that this layer hands down (see `backward_plan`).
        kind = LAYERS.get(entry.param.type)
        if not entry.param.loss_weight and kind is not None and kind.is_loss:
            entry.param.loss_weight.extend([1.0] + [0.0] * (len(entry.param.top) - 1))
    return result


def _check_weights(layer: Any, location: Location) -> None:
    if layer.loss_weight and len(layer.loss_weight) != len(layer.top):
        raise location.error(
            f"layer {layer.name!r}: {len(layer.loss_weight)} values of loss_weight are given for "
            f"{len(layer.top)} top blobs; give one for each, or none",
            "loss_weight",
        )


def _inputs(net: Any, location: Location) -> list[Entry]:
    """The fields `input`, `input_shape` and `input_dim` of older files as an Input layer."""
    if not net.input:
        return []
    shapes = [list(shape.dim) for shape in net.input_shape]
    dims = list(net.input_dim)
    shapes += [dims[k : k + 4] for k in range(0, len(dims), 4)]
    param = LayerParameter(name="input", type="Input", top=list(net.input))
    for shape in shapes:
        param.input_param.shape.add(dim=shape)
    return [Entry(param, location.find("input"))]


def _is_included(layer: Any, state: Any, location: Location) -> bool:
    if layer.include and layer.exclude:
        raise location.error(f"layer {layer.name!r} has include and exclude rules; give one kind", "exclude")
    if layer.include:
        return any(_meets(rule, state) for rule in layer.include)
    return not any(_meets(rule, state) for rule in layer.exclude)


def _meets(rule: Any, state: Any) -> bool:
    stages = set(state.stage)
    return (
        (not rule.HasField("phase") or rule.phase == state.phase)
        and (not rule.HasField("min_level") or state.level >= rule.min_level)
        and (not rule.HasField("max_level") or state.level <= rule.max_level)
        and set(rule.stage) <= stages
        and not set(rule.not_stage) & stages
    )


Top = tuple[int, int]  # number of a layer and of one of its tops


def _with_splits(chosen: list[Entry]) -> list[Entry]:
    """Insert a Split layer behind each blob that several layers read, and have each read its own copy."""
    sources, readers = _connect(chosen)
    result: list[Entry] = []
    taken: dict[Top, int] = {}
    for number, entry in enumerate(chosen):
        param = entry.param
        for k in range(len(param.bottom)):
            source = sources[(number, k)]
            if readers[source] > 1:
                param.bottom[k] = _copy_name(chosen, source, taken.setdefault(source, 0))
                taken[source] += 1
        result.append(entry)
        for k in range(len(param.top)):
            count = readers.get((number, k), 0)
            if count > 1:
                result.append(Entry(_split(chosen, (number, k), count, taken), entry.location))
    return result


def _connect(chosen: list[Entry]) -> tuple[dict[Top, Top], dict[Top, int]]:
    """Which top each bottom reads, and how many read each top (a given `loss_weight` counts as one more)."""
    latest: dict[str, Top] = {}
    sources: dict[Top, Top] = {}
    readers: dict[Top, int] = {}
    for number, entry in enumerate(chosen):
        param = entry.param
        for k, bottom in enumerate(param.bottom):
            if bottom not in latest:
                raise entry.location.error(
                    f"layer {param.name!r} reads blob {bottom!r}, which no layer before it gives", "bottom", k
                )
            sources[(number, k)] = latest[bottom]
            readers[latest[bottom]] = readers.get(latest[bottom], 0) + 1
        for k, top in enumerate(param.top):
            latest[top] = (number, k)
        for k, weight in enumerate(param.loss_weight[: len(param.top)]):
            if weight and readers.get((number, k)) is None:
                readers[(number, k)] = 0
    for number, entry in enumerate(chosen):
        for k, weight in enumerate(entry.param.loss_weight[: len(entry.param.top)]):
            if weight and readers[(number, k)]:
                readers[(number, k)] += 1
    return sources, readers


def _prefix(chosen: list[Entry], source: Top) -> str:
    param = chosen[source[0]].param
    return f"{param.top[source[1]]}_{param.name}_{source[1]}_split"


def _copy_name(chosen: list[Entry], source: Top, number: int) -> str:
    return f"{_prefix(chosen, source)}_{number}"


def _split(chosen: list[Entry], source: Top, count: int, taken: dict[Top, int]) -> Any:
    producer = chosen[source[0]].param
    split = LayerParameter(name=_prefix(chosen, source), type="Split", bottom=[producer.top[source[1]]])
    split.top.extend(_copy_name(chosen, source, number) for number in range(count))
    if source[1] < len(producer.loss_weight) and producer.loss_weight[source[1]]:
        # The first copy is the loss; the others are what the layers read.
        split.loss_weight.extend([producer.loss_weight[source[1]]] + [0.0] * (count - 1))
        producer.loss_weight[source[1]] = 0.0
        taken[source] = 1
    return split


@dataclass(frozen=True)
class BackwardPlan:
    """Which layers of a net run backward.

    Attributes:
        runs: Per layer, whether it does.
        wanted: Per layer and bottom, whether its gradient is computed.
        given: Names of the blobs whose gradient the layers that give them read.
    """

    runs: list[bool]
    wanted: list[list[bool]]
    given: set[str]


def backward_plan(layers: Sequence[Layer], weights: Mapping[str, float], force: bool) -> BackwardPlan:
    """Run what lies between something that learns and a loss, or with `force` everything.

    A blob that a layer reads has the gradient that this layer hands down, or none. So a loss without a copy
    (see `entries`) has that in place of its own weight.

    Args:
        layers: Bottom to top.
        weights: Weight of each blob in the loss, by name.
        force: `force_backward` of the net.

    Raises:
        PrototxtError: `propagate_down` does not fit the bottoms.
    """
    wanted = _wanted(layers)
    if force:
        # Caffe asks every layer for all gradients but those of a loss's labels, whatever propagate_down says.
        forced = [
            [given or not (layer.is_loss and k == 1) for k, given in enumerate(mine)]
            for layer, mine in zip(layers, wanted, strict=True)
        ]
        return BackwardPlan([layer.has_backward for layer in layers], forced, set(weights))
    given = {name for name, weight in weights.items() if weight}
    arriving = set(given)  # at the tops of the layers that are still to come
    runs = [False] * len(layers)
    for index in range(len(layers) - 1, -1, -1):
        layer = layers[index]
        handed: set[str] = set()
        if layer.has_backward and arriving & set(layer.param.top):
            runs[index] = _has_use(layer, wanted[index])
            handed |= {name for name, used in zip(layer.param.bottom, wanted[index], strict=True) if used}
        arriving = arriving.difference(layer.param.bottom) | handed
        given |= handed
    return BackwardPlan(runs, wanted, given)


def _wanted(layers: Sequence[Layer]) -> list[list[bool]]:
    """Per layer and bottom, whether anything below it learns, unless `propagate_down` decides."""
    needs: dict[str, bool] = {}
    result: list[list[bool]] = []
    for layer in layers:
        wanted = [needs.get(name, False) for name in layer.param.bottom]
        given = list(layer.param.propagate_down)
        if given and len(given) != len(wanted):
            raise layer.error(
                f"{len(wanted)} bottoms have {len(given)} values of propagate_down", "propagate_down"
            )
        wanted = given or wanted
        needs.update(dict.fromkeys(layer.param.top, _has_use(layer, wanted) and layer.has_backward))
        result.append(wanted)
    return result


def _has_use(layer: Layer, wanted: Sequence[bool]) -> bool:
    """Whether a backward pass of the layer brings a gradient that is used."""
    return any(wanted) or any(layer.learns(k) for k in range(len(layer.blobs)))
