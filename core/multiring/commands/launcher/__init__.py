"""Starts the ranks of a job on this host, carries their output, and ends all of them when one fails."""

from __future__ import annotations

from multiring.commands.launcher.job import run_job
from multiring.commands.launcher.rank_starter import JobOptions, ProgramError

__all__ = ["JobOptions", "ProgramError", "run_job"]
