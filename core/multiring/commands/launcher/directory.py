"""The directory where the ranks of a job meet, and the process that removes it however the launcher ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from multiring.commands.launcher import guardian
from multiring.errors import UsageError
from multiring.store.file import job_directory_prefix, remove_abandoned

__all__ = ["Guard", "job_directory"]

_GUARD_SECONDS = 20.0


class Guard:
    """Handle of the process that ends what is left of a job (see guardian.py)."""

    def __init__(self, job_id: str, directory: Path) -> None:
        self._patience = _GUARD_SECONDS
        reading, self._writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, job_id, str(directory)],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._writing)
            raise
        finally:
            os.close(reading)

    def watch(self, pid: int) -> None:
        """Tells it the process id of a rank."""
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            os.write(self._writing, b"%d\n" % pid)

    def finish(self) -> None:
        """Lets it kill what is left and remove the directory; may be called again."""
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def join(self) -> None:
        """Waits until it has done so; one that takes long goes on without us, and is waited for once."""
        self.finish()
        patience, self._patience = self._patience, 0.0
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)


@contextlib.contextmanager
def job_directory(job_id: str) -> Iterator[tuple[Path, Guard]]:
    """Makes a directory with mode 0700 for the job and removes it, with every process of the job, at the end.

    Raises:
        UsageError: There is no place for it.
    """
    try:
        directory = Path(tempfile.gettempdir()).absolute() / (job_directory_prefix() + secrets.token_hex(8))
        # The guard comes first: if we are killed at any moment from here on, it removes what there is.
        guard = Guard(job_id, directory)
    except OSError as error:
        raise UsageError(f"cannot start a job: {error}") from error
    try:
        with _locked(directory):
            remove_abandoned(directory)
            yield directory, guard
    finally:
        guard.join()
        shutil.rmtree(directory, ignore_errors=True)  # for the case that somebody has killed the guard


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Makes the directory and holds a lock on it, which says that the job lives; see `remove_abandoned`."""
    try:
        directory.mkdir(mode=0o700)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(
            f"cannot make a directory for the job in {directory.parent}: {error.strerror}; set TMPDIR to a "
            "directory you can write to"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield
    finally:
        os.close(lock)
