"""The report's picture, as SVG text that goes straight into the page."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from multiring.benchmarks.gradients.training_speed import TrainingSpeed
from multiring.models.regress.outcome import Outcome, Outcomes, State

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

# Lines that lie on each other: the first ones are wide and pale, so that the last ones do not hide them.
WIDEST, NARROWEST = 7.0, 1.2
TITLES = {
    "train-float32": "loss of the compared training, by step",
    "accuracy": "loss on digits, by epoch",
    "speed": "scaling efficiency (1: keeping in step costs nothing)",
}
Found = Sequence[tuple[tuple[str, int], Outcome]]


def draw(outcomes: Outcomes, titles: Mapping[str, str]) -> str | None:
    """Loss curves of all frameworks and ranks over each other, and efficiencies; None: there are none."""
    from matplotlib.figure import Figure

    positions = list(titles)
    by_task: dict[str, Found] = {
        task: sorted(
            (
                (key[:2], each)
                for key, each in outcomes.items()
                if key[2] == task and each.state is State.DONE
            ),
            key=lambda item: (positions.index(item[0][0]), item[0][1]),
        )
        for task in TITLES
    }
    shown = {task: found for task, found in by_task.items() if found}
    if not shown:
        return None
    figure = Figure(figsize=(5.5 * len(shown), 4.5), layout="constrained")
    for axes, (task, found) in zip(
        figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True
    ):
        axes.set_title(TITLES[task], fontsize=10)
        if task == "speed":
            _bars(axes, found, titles)
        else:
            _lines(axes, found, titles)
    stream = io.StringIO()
    # Without the date the same figures give the same file.
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


def _lines(axes: Axes, found: Found, titles: Mapping[str, str]) -> None:
    for number, ((framework, ranks), outcome) in enumerate(found):
        share = number / max(1, len(found) - 1)
        curve = outcome.values.get("curve") or list(enumerate(outcome.values["losses"], 1))
        dashes: Any = "-" if ranks == 1 else (0, (4.0, 1.2 * ranks))
        axes.plot(
            *zip(*curve, strict=True),
            color=f"C{list(titles).index(framework)}",
            linewidth=WIDEST + (NARROWEST - WIDEST) * share,
            alpha=0.35 + 0.6 * share,
            linestyle=dashes,
            label=_label(titles[framework], ranks),
        )
    axes.legend(fontsize=8)


def _bars(axes: Axes, found: Found, titles: Mapping[str, str]) -> None:
    for position, ((framework, ranks), outcome) in enumerate(found):
        speed = TrainingSpeed(**outcome.values)
        bars = [(_label(titles[framework], ranks), speed.efficiency)]
        if speed.own_efficiency is not None:
            bars.append((speed.own_way or "", speed.own_efficiency))
        for number, (label, ratio) in enumerate(bars):
            bar = axes.barh(position + 0.4 * number, ratio.median, 0.35, color=("C0", "C1")[number])
            axes.bar_label(bar, [f"{label}: {ratio.median:.1%}"], label_type="center", fontsize=8)
    axes.set_yticks([])
    axes.set_xlim(0, 1.1)
    axes.invert_yaxis()


def _label(title: str, ranks: int) -> str:
    return f"{title}, {ranks} rank{'s' if ranks > 1 else ''}"
