"""Nets in the format of 2014 (`layers { type: CONVOLUTION blobs_lr: 1 }`) as those of today, line by line."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["upgraded"]

_TOKEN = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[\w.+-]+|\s+|[^\s]""")
# Types whose name is not that of the enumeration in other letters (INNER_PRODUCT, InnerProduct).
_TYPES = {
    "ABSVAL": "AbsVal",
    "ARGMAX": "ArgMax",
    "BNLL": "BNLL",
    "HDF5_DATA": "HDF5Data",
    "HDF5_OUTPUT": "HDF5Output",
    "IM2COL": "Im2col",
    "LRN": "LRN",
    "MVN": "MVN",
    "RELU": "ReLU",
    "SOFTMAX_LOSS": "SoftmaxWithLoss",
    "TANH": "TanH",
}
# Fields of a layer that are a `param` of a blob today, and what they are called in it.
_OF_BLOBS = {"blobs_lr": "lr_mult", "weight_decay": "decay_mult", "param": "name"}


def upgraded(text: str) -> str:
    """Return the text of a net with each `layers` as a `layer`, as Caffe's upgrade_net_proto_text makes it.
    What stands in a line stays in that line."""
    tokens = [match.group() for match in _TOKEN.finditer(text)]
    if "layers" not in tokens:
        return text
    result: list[str] = []
    at = depth = 0
    while at < len(tokens):
        if depth == 0 and tokens[at] == "layers":
            end = _end_of_block(tokens, at)
            result += ["layer", *_layer(tokens[at + 1 : end])]
            at = end
            continue
        depth += (tokens[at] in "{<") - (tokens[at] in "}>")
        result.append(tokens[at])
        at += 1
    return "".join(result)


def _end_of_block(tokens: list[str], at: int) -> int:
    """Return where the block ends that begins after a token."""
    depth = 0
    while at < len(tokens):
        if tokens[at] in ("{", "<"):
            depth += 1
        elif tokens[at] in ("}", ">"):
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return at


def _layer(tokens: list[str]) -> Iterator[str]:
    """Yield the block of a layer as that of today."""
    blobs: dict[str, list[str]] = {name: [] for name in _OF_BLOBS}
    for name, _, value in _fields(tokens):
        if name in blobs:
            blobs[name].append(tokens[value])
    count = max(map(len, blobs.values()))
    params = " ".join(
        "param { "
        + " ".join(f"{_OF_BLOBS[name]}: {given[k]}" for name, given in blobs.items() if k < len(given))
        + " }"
        for k in range(count)
    )
    replaced: dict[int, str] = {}
    for name, at, value in _fields(tokens):
        if name == "type":
            replaced[value] = f'"{_type(tokens[value])}"'
        elif name in blobs:
            replaced |= {
                k: params if k == at else "" for k in range(at, value + 1) if not tokens[k].isspace()
            }
            params = ""  # all of them are where the first was
    for k, token in enumerate(tokens):
        yield replaced.get(k, token)


def _fields(tokens: list[str]) -> Iterator[tuple[str, int, int]]:
    """Yield the fields of a block that have a plain value: the name, its place and that of the value."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += (token in ("{", "<")) - (token in ("}", ">"))
        if depth != 1 or not re.fullmatch(r"[a-z]\w*", token):
            continue
        rest = [k for k in range(at + 1, min(at + 6, len(tokens))) if not tokens[k].isspace()]
        if len(rest) > 1 and tokens[rest[0]] == ":" and tokens[rest[1]] not in ("{", "["):
            yield token, at, rest[1]


def _type(name: str) -> str:
    return _TYPES.get(name, "".join(word.capitalize() for word in name.split("_")))
