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


def test_peak_is_linear_in_the_global_batch() -> None:
    assert recipe().peak_lr == 0.1
    assert recipe(global_batch=8192).peak_lr == pytest.approx(3.2)
    assert recipe(global_batch=64, reference_batch=64).peak_lr == 0.1


def test_warm_up_rises_linearly_and_meets_the_peak() -> None:
    schedule = recipe(warmup_steps=50)
    rates = [schedule.lr(step) for step in range(51)]
    assert rates[0] == pytest.approx(0.1 / 50)
    assert rates[49] == rates[50] == pytest.approx(0.1)
    assert [b - a for a, b in itertools.pairwise(rates[:50])] == pytest.approx([0.1 / 50] * 49)


def test_cosine_falls_from_the_peak_to_zero() -> None:
    schedule = recipe(warmup_steps=100)
    assert schedule.lr(100) == pytest.approx(0.1)
    assert schedule.lr(500) == pytest.approx(0.05)
    assert schedule.lr(900) == pytest.approx(0.0, abs=1e-17)
    assert schedule.lr(5000) == pytest.approx(0.0, abs=1e-17)


def test_step_decay_divides_by_ten_at_epochs_30_60_80_of_90() -> None:
    schedule = recipe(decay="step")
    rates = [schedule.lr(step) for step in (0, 299, 300, 599, 600, 799, 800, 899)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3, 1e-4, 1e-4])


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
