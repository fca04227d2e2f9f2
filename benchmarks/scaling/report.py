"""The scaling curve: a table for docs/scaling.md and a picture."""

from __future__ import annotations

from pathlib import Path

from multiring.benchmarks.scaling.machine import CONTENDERS, OURS
from multiring.benchmarks.scaling.results import Results
from multiring.benchmarks.scaling.training import (
    BATCH,
    IMAGES_PER_SECOND,
    buckets,
    interpolate,
    step_seconds,
)

__all__ = ["efficiency", "tables", "write"]

FASTER = 3.0

# Speed-ups that IBM published for ResNet-50 over GPUs (2017), relative to 4.
PUBLISHED = {4: 1.0, 8: 2.0, 16: 3.9, 32: 7.9, 64: 15.5, 128: 30.5, 256: 60.6}

_STYLES = {
    OURS: ("#1f4e9c", "o"),
    "ring": ("#d1600a", "^"),
    "recursive doubling": ("#2e8b57", "D"),
    "Open MPI's choice": ("#8e44ad", "v"),
    "MPICH's choice": ("#7f7f7f", "s"),
}


def efficiency(results: Results, contender: str, ranks: int, images_per_second: float) -> float:
    """The part of a step that is computing, with `ranks` ranks."""
    compute = BATCH / images_per_second
    left = buckets(results.profile)
    seconds_of = {nbytes: _allreduce_seconds(results, contender, ranks, nbytes) for nbytes, _ in left}
    return compute / step_seconds(compute, left, seconds_of)


def _allreduce_seconds(results: Results, contender: str, ranks: int, nbytes: int) -> float:
    machine = results.machine
    if contender == OURS and ranks == machine.ranks_per_host:
        return machine.memory_seconds(nbytes)
    simulated = interpolate(results.seconds[contender][ranks], nbytes)
    return simulated + (0.0 if contender == OURS else machine.addition_seconds(nbytes))


def _ranks(results: Results) -> list[int]:
    return [results.machine.ranks_per_host, *sorted(results.seconds[OURS])]


def _cell(results: Results, contender: str, ranks: int, images_per_second: float) -> str:
    one_host = contender == OURS and ranks == results.machine.ranks_per_host
    known = one_host or ranks in results.seconds.get(contender, {})
    return f"{100 * efficiency(results, contender, ranks, images_per_second):.1f}" if known else "-"


def _efficiencies(results: Results, images_per_second: float) -> list[str]:
    published = images_per_second == IMAGES_PER_SECOND
    head = ["ranks", "speed-up", *(["published", "published %"] if published else [])]
    lines = [
        "| " + " | ".join([*head, *(f"{name} %" for name in CONTENDERS)]) + " |",
        "|" + "--:|" * (len(head) + len(CONTENDERS)),
    ]
    base = results.machine.ranks_per_host
    least = efficiency(results, OURS, base, images_per_second)
    for ranks in _ranks(results):
        speedup = efficiency(results, OURS, ranks, images_per_second) / least * ranks / base
        cells = [str(ranks), f"{speedup:.1f}"]
        if published:
            known = PUBLISHED.get(ranks)
            cells += [f"{known}", f"{100 * known * base / ranks:.0f}"] if known else ["", ""]
        cells += [_cell(results, name, ranks, images_per_second) for name in CONTENDERS]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _times(results: Results) -> list[str]:
    size = max(next(iter(results.seconds[OURS].values())))
    lines = [
        f"| ranks | limit ms | {' | '.join(f'{name} ms' for name in CONTENDERS)} |",
        "|" + "--:|" * (2 + len(CONTENDERS)),
    ]
    machine = results.machine
    for ranks in sorted(results.seconds[OURS]):
        hosts = ranks // machine.ranks_per_host
        limit = 2 * (hosts - 1) / hosts * size / (machine.bytes_per_second * machine.usable)
        cells = [str(ranks), f"{limit * 1e3:.2f}"]
        for name in CONTENDERS:
            times = results.seconds.get(name, {}).get(ranks)
            cells.append(f"{_allreduce_seconds(results, name, ranks, size) * 1e3:.2f}" if times else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def tables(results: Results) -> str:
    """The tables in Markdown."""
    left = ", ".join(
        f"{nbytes / 2**20:.1f} MiB at {100 * ready:.0f} %" for nbytes, ready in buckets(results.profile)
    )
    size = max(next(iter(results.seconds[OURS].values())))
    parts = [
        f"**Simulated**: ResNet-50, {BATCH} images a rank, {IMAGES_PER_SECOND:.0f} images/s (a P100):",
        "",
        *_efficiencies(results, IMAGES_PER_SECOND),
        "",
        f"The same with ranks three times as fast ({FASTER * IMAGES_PER_SECOND:.0f} images/s), same network:",
        "",
        *_efficiencies(results, FASTER * IMAGES_PER_SECOND),
        "",
        f"One allreduce of {size / 2**20:.0f} MiB, beside bytes over bandwidth:",
        "",
        *_times(results),
        "",
        f"Buckets, and when they leave: {left} of the step ({results.profile.device}).",
    ]
    return "\n".join(parts)


_BEGIN, _END = "<!-- simulated: begin -->", "<!-- simulated: end -->"


def write(results: Results, page: Path, picture: Path) -> None:
    """Puts the tables between the marks of `page`, and draws `picture`."""
    text = page.read_text()
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    page.write_text(f"{before}{_BEGIN}\n\n{tables(results)}\n\n{_END}{after}")
    _draw(results, picture)


def _draw(results: Results, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Simulated: ResNet-50, hosts of 4 ranks with one link of 100 Gbit/s each", fontsize=11)
    for axes, speed in zip(
        figure.subplots(1, 2), (IMAGES_PER_SECOND, FASTER * IMAGES_PER_SECOND), strict=True
    ):
        for name in CONTENDERS:
            known = [ranks for ranks in _ranks(results) if _cell(results, name, ranks, speed) != "-"]
            colour, marker = _STYLES[name]
            values = [100 * efficiency(results, name, ranks, speed) for ranks in known]
            axes.plot(known, values, color=colour, marker=marker, label=name)
        if speed == IMAGES_PER_SECOND:
            shown = {ranks: 100 * value * 4 / ranks for ranks, value in PUBLISHED.items()}
            axes.plot(list(shown), list(shown.values()), "k--", marker="x", label="published, 2017")
        axes.set_xscale("log", base=2)
        axes.set_xticks(_ranks(results), [str(ranks) for ranks in _ranks(results)])
        axes.set_title(f"{speed:.0f} images/s on each rank", fontsize=10)
        axes.set_xlabel("ranks")
        axes.set_ylabel("efficiency %")
        axes.set_ylim(0, 103)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, format="png")
