"""The scaling curve: a table for docs/scaling.md and a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from multiring.benchmarks.plot import Line, Lines, draw
from multiring.benchmarks.scaling.machine import CONTENDERS, OUR_RING, OURS, is_ours
from multiring.benchmarks.scaling.results import Results
from multiring.benchmarks.scaling.training import (
    BATCH,
    IMAGES_PER_SECOND,
    buckets,
    interpolate,
    step_seconds,
)
from multiring.benchmarks.table import Table
from multiring.units import size_text

__all__ = ["efficiency", "tables", "write"]

FASTER = 3.0
# Beside each other in tables, which have five columns at most.
SHOWN = (OURS, "ring", "Open MPI's choice")

# Speed-ups that IBM published for ResNet-50 over GPUs (2017), relative to 4.
PUBLISHED = {4: 1.0, 8: 2.0, 16: 3.9, 32: 7.9, 64: 15.5, 128: 30.5, 256: 60.6}

Columns = dict[str, Callable[[int], str]]

_STYLES = {
    OURS: ("#1f4e9c", "o", "-"),
    OUR_RING: ("#1f4e9c", "^", ":"),
    "ring": ("#d1600a", "^", "-"),
    "recursive doubling": ("#2e8b57", "D", "-"),
    "Open MPI's choice": ("#8e44ad", "v", "-"),
    "MPICH's choice": ("#7f7f7f", "s", "-"),
}


def efficiency(results: Results, contender: str, ranks: int, images_per_second: float) -> float:
    """The part of a step that is computing, with `ranks` ranks."""
    compute = BATCH / images_per_second
    left = buckets(results.profile)
    seconds_of = {nbytes: _allreduce_seconds(results, contender, ranks, nbytes) for nbytes, _ in left}
    return compute / step_seconds(compute, left, seconds_of)


def _allreduce_seconds(results: Results, contender: str, ranks: int, nbytes: int) -> float:
    machine = results.machine
    if is_ours(contender) and ranks == machine.ranks_per_host:
        return machine.memory_seconds(nbytes)
    simulated = interpolate(results.seconds[contender][ranks], nbytes)
    return simulated + (0.0 if is_ours(contender) else machine.addition_seconds(nbytes))


def _ranks(results: Results) -> list[int]:
    return [results.machine.ranks_per_host, *sorted(results.seconds[OURS])]


def _cell(results: Results, contender: str, ranks: int, images_per_second: float) -> str:
    one_host = is_ours(contender) and ranks == results.machine.ranks_per_host
    known = one_host or ranks in results.seconds.get(contender, {})
    return f"{100 * efficiency(results, contender, ranks, images_per_second):.1f}" if known else "-"


def _table(ranks: Sequence[int], columns: Columns) -> str:
    """A row for each number of ranks; a column says what stands there for so many."""
    names = ["ranks", *columns]
    rows = [[str(count), *(cell(count) for cell in columns.values())] for count in ranks]
    return Table(names, rows).markdown()


def _efficiencies(results: Results, images_per_second: float, names: Sequence[str]) -> Columns:
    return {f"{name} %": partial(_cell, results, name, images_per_second=images_per_second) for name in names}


def _speedup(results: Results, images_per_second: float) -> Columns:
    base = results.machine.ranks_per_host
    least = efficiency(results, OURS, base, images_per_second)
    return {
        "speed-up": lambda ranks: (
            f"{efficiency(results, OURS, ranks, images_per_second) / least * ranks / base:.1f}"
        )
    }


def _published(base: int) -> Columns:
    return {
        "published": lambda ranks: str(PUBLISHED.get(ranks, "")),
        "published %": lambda ranks: (
            f"{100 * PUBLISHED[ranks] * base / ranks:.0f}" if ranks in PUBLISHED else ""
        ),
    }


def _milliseconds(results: Results, contender: str, size: int, ranks: int) -> str:
    known = ranks in results.seconds.get(contender, {})
    return f"{_allreduce_seconds(results, contender, ranks, size) * 1e3:.2f}" if known else "-"


def _times(results: Results, size: int) -> Columns:
    machine = results.machine

    def limit(ranks: int) -> str:
        hosts = ranks // machine.ranks_per_host
        seconds = 2 * (hosts - 1) / hosts * size / (machine.bytes_per_second * machine.usable)
        return f"{seconds * 1e3:.2f}"

    return {
        "limit ms": limit,
        **{f"{name} ms": partial(_milliseconds, results, name, size) for name in SHOWN},
    }


def _ring_times(results: Results, sizes: Sequence[int]) -> Columns:
    return {
        f"{how} ms, {size_text(size)}": partial(_milliseconds, results, name, size)
        for size in sizes
        for how, name in (("chosen", OURS), ("ring", OUR_RING))
    }


def tables(results: Results) -> str:
    """The tables in Markdown."""
    left = ", ".join(
        f"{nbytes / 2**20:.1f} MiB at {100 * ready:.0f} %" for nbytes, ready in buckets(results.profile)
    )
    ranks = _ranks(results)
    others = [name for name in CONTENDERS if not is_ours(name)]
    sizes = sorted(next(iter(results.seconds[OURS].values())))
    faster = FASTER * IMAGES_PER_SECOND
    parts = [
        f"**Simulated**: ResNet-50, {BATCH} images a rank, {IMAGES_PER_SECOND:.0f} images/s (a P100):",
        _table(
            ranks,
            _speedup(results, IMAGES_PER_SECOND)
            | _published(ranks[0])
            | _efficiencies(results, IMAGES_PER_SECOND, [OURS]),
        ),
        "The others on the same machine:",
        _table(ranks, _efficiencies(results, IMAGES_PER_SECOND, others)),
        f"The same with ranks three times as fast ({faster:.0f} images/s), same network:",
        _table(ranks, _speedup(results, faster) | _efficiencies(results, faster, SHOWN)),
        f"One allreduce of {sizes[-1] / 2**20:.0f} MiB, beside bytes over bandwidth:",
        _table(sorted(results.seconds[OURS]), _times(results, sizes[-1])),
        "multiring by the plan that it chooses, and by a ring across hosts (`4px2r`, ..., `--order any`):",
        _table(sorted(results.seconds.get(OUR_RING, {})), _ring_times(results, (sizes[0], sizes[-1]))),
        f"Buckets, and when they leave: {left} of the step ({results.profile.device}).",
    ]
    return "\n\n".join(parts)


_BEGIN, _END = "<!-- simulated: begin -->", "<!-- simulated: end -->"


def write(results: Results, page: Path, picture: Path) -> None:
    """Puts the tables between the marks of `page`, and draws `picture`."""
    text = page.read_text()
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    page.write_text(f"{before}{_BEGIN}\n\n{tables(results)}\n\n{_END}{after}")
    title = "Simulated: ResNet-50, hosts of 4 ranks with one link of 100 Gbit/s each"
    draw(title, [[_panel(results, IMAGES_PER_SECOND), _panel(results, FASTER * IMAGES_PER_SECOND)]], picture)


def _panel(results: Results, images_per_second: float) -> Lines:
    lines = []
    for name in CONTENDERS:
        cells = [(ranks, _cell(results, name, ranks, images_per_second)) for ranks in _ranks(results)]
        known = [ranks for ranks, cell in cells if cell != "-"]
        values = [100 * efficiency(results, name, ranks, images_per_second) for ranks in known]
        lines.append(Line(name, _STYLES[name], known, values))
    if images_per_second == IMAGES_PER_SECOND:
        shown = [100 * speedup * 4 / ranks for ranks, speedup in PUBLISHED.items()]
        lines.append(Line("published, 2017", ("black", "x", "--"), list(PUBLISHED), shown))
    title = f"{images_per_second:.0f} images/s on each rank"
    return Lines(title, "ranks", "efficiency %", lines, lambda ranks: f"{ranks:.0f}", most=103)
