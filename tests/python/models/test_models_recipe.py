"""The learning rate as a function of the step."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring.errors import UsageError
from multiring.models.trainers.recipe import Recipe


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{"base_lr": 0.1, "global_batch": 256, "total_steps": 900, **changes})


SCHEDULES = [
    ({}, {0: 0.1}),
    ({"global_batch": 8192}, {0: 3.2}),  # linear in the global batch
    ({"global_batch": 64, "reference_batch": 64}, {0: 0.1}),
    ({"warmup_steps": 50}, {0: 0.002, 1: 0.004, 24: 0.05, 48: 0.098, 49: 0.1, 50: 0.1}),
    ({"warmup_steps": 100}, {100: 0.1, 500: 0.05, 900: 0.0, 5000: 0.0}),
    ({"decay": "step"}, {299: 0.1, 300: 0.01, 599: 0.01, 600: 1e-3, 799: 1e-3, 800: 1e-4, 899: 1e-4}),
]


@pytest.mark.parametrize(("changes", "rates"), SCHEDULES)
def test_schedules(changes: dict[str, Any], rates: dict[int, float]) -> None:
    schedule = recipe(**changes)
    assert {step: schedule.lr(step) for step in rates} == pytest.approx(rates, rel=1e-6, abs=1e-17)
    assert schedule.peak_lr == pytest.approx(max(rates.values()))


@given(st.integers(1, 500), st.integers(0, 600), st.sampled_from(["cosine", "step", "constant"]))
def test_rate_never_exceeds_the_peak_nor_rises_after_the_warm_up(total: int, warmup: int, decay: Any) -> None:
    schedule = recipe(total_steps=total, warmup_steps=warmup, decay=decay)
    rates = [schedule.lr(step) for step in range(total)]
    assert all(math.isfinite(rate) and 0 <= rate <= schedule.peak_lr for rate in rates)
    after = rates[warmup:]
    assert all(later <= earlier for earlier, later in itertools.pairwise(after))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decay": "sudden"}, "unknown decay 'sudden'"),
        ({"base_lr": -1.0}, "must not be negative"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"momentum": 0.0}, "nesterov needs a momentum"),
        ({"global_batch": 0}, "at least 1"),
        ({"warmup_steps": -1}, "at least 0"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recipe(**changes)
