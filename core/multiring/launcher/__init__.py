"""Starts the ranks of a job on this host, carries their output, and ends all of them when one fails."""

from __future__ import annotations

from multiring.launcher.job import JobOptions, ProgramError, run_job

__all__ = ["JobOptions", "ProgramError", "run_job"]
