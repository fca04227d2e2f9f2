"""A store in a directory that only its owner can enter: one file per key.

A value is written to a temporary file that is then renamed, so a reader sees all of it or none.

Its users hold a shared lock on it, which the kernel lets go of when a process ends in
whatever way. Who can have it exclusively is alone: what the last one to leave finds there, or the first one
to come, nobody needs any more. Only files of stores are removed, known by their names, and only a directory
that a store has made.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import stat
import tempfile
import time
import urllib.parse
from pathlib import Path

from multiring.errors import InternalError, PeerLostError, UsageError
from multiring.store.base import MAX_VALUE_BYTES, Interrupt, Store, check_key, check_value, no_such_key

__all__ = ["FileStore", "job_directory_prefix", "remove_abandoned"]

# A wait looks again after this long at first and at most, in seconds: a rendezvous takes milliseconds when
# all ranks are there, and a rank that waits for minutes must not keep a core busy.
_FIRST_PAUSE = 0.0002
_LONGEST_PAUSE = 0.01

# What stores and ranks (peer_links.cpp) leave in the directory: names that nobody else would give to a file,
# or to a socket.
_PREFIX = "multiring-"
_FILE = re.compile(rf"{_PREFIX}(?:key|hash|part)-[\w.%~-]*")
_SOCKET = re.compile(r"\d+-\d+\.sock")
# In a directory that a store has made, so that the last one to leave removes it.
_MADE = _PREFIX + "made"

# Between making a directory and locking it passes less than this, in seconds.
_ABANDONED_SECONDS = 60.0


def job_directory_prefix() -> str:
    """How the names of this user's job directories in the temporary directory begin."""
    return f"multiring-{os.geteuid()}-"


class FileStore(Store):
    """A store for the ranks of one host.

    Args:
        directory: Made with mode 0700 if it is missing, and then removed by the last one to leave. One that
            is there must belong to the caller and be closed to everybody else, because who can write there
            can speak for any rank; it stays, with all that is not of a store.

    Raises:
        UsageError: The directory is not a directory of the caller's own, or cannot be made.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).absolute()
        self._lock: int | None = None  # a descriptor of the directory
        try:
            made = False
            while self._lock is None:
                made = self._make()
                self._lock = _lock_shared(self.directory)
            if made:
                os.close(os.open(_MADE, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=self._lock))
        except OSError as error:
            self.close()
            raise UsageError(
                f"the store's directory {self.directory} cannot be used: {error.strerror}; "
                "name another in MULTIRING_STORE or set TMPDIR to a directory you can write to"
            ) from error

    def __str__(self) -> str:
        return f"store file://{self.directory}"

    def _make(self) -> bool:
        """Whether there was no such directory."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.directory.mkdir(mode=0o700)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # the last one to use it has just removed it
                self._check_owner()
            return False
        if self.directory.name.startswith(job_directory_prefix()):
            remove_abandoned(self.directory)
        return True

    def _check_owner(self) -> None:
        found = self.directory.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise UsageError(f"the store's directory {self.directory} is not a directory; remove it")
        if found.st_uid != os.geteuid():
            raise UsageError(
                f"the store's directory {self.directory} belongs to user {found.st_uid}, not to user "
                f"{os.geteuid()}: somebody else could speak for a rank; name another in MULTIRING_STORE"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise UsageError(
                f"the store's directory {self.directory} has mode {stat.S_IMODE(found.st_mode):04o}, so "
                f"others could speak for a rank; run: chmod 700 {self.directory}"
            )

    def _path(self, key: str) -> Path:
        encoded = check_key(key)
        name = f"{_PREFIX}key-" + urllib.parse.quote(encoded, safe="")
        if len(name) > 200:  # file names end at 255 bytes
            name = f"{_PREFIX}hash-" + hashlib.sha256(encoded).hexdigest()
        return self.directory / name

    def set(self, key: str, value: bytes, interrupt: Interrupt | None = None) -> None:
        path = self._path(key)
        check_value(key, value)
        temporary: str | None = None
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=f"{_PREFIX}part-", dir=self.directory)
            with os.fdopen(descriptor, "wb") as file:
                file.write(value)
            os.rename(temporary, path)
            temporary = None
        except FileNotFoundError:
            raise self._gone(f"setting the key {key!r}") from None
        except OSError as error:
            raise InternalError(
                f"cannot set the key {key!r} in the {self}: {error.strerror}; is there space "
                "left on the device?"
            ) from error
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def forget(self, key: str) -> None:
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def get(self, key: str, timeout: float, interrupt: Interrupt | None = None) -> bytes:
        path = self._path(key)
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while True:
            try:
                with path.open("rb") as file:
                    return file.read(MAX_VALUE_BYTES + 1)
            except FileNotFoundError:
                if not self.directory.is_dir():
                    raise self._gone(f"waiting for the key {key!r}") from None
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise no_such_key(key, str(self), timeout)
            if interrupt is not None:
                interrupt()
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _gone(self, doing: str) -> PeerLostError:
        return PeerLostError(
            f"the {self} was removed while this rank was {doing}: the launcher or another rank has ended "
            "the job; look at their output"
        )

    def close(self) -> None:
        """Leaves the store; the last one to leave removes it, and its directory if a store has made that. May
        be called again.

        It is safe to open the directory again while others still leave it.
        """
        if self._lock is not None:
            lock, self._lock = self._lock, None
            try:
                if _lock_exclusively(lock):
                    _remove(self.directory, lock)
            finally:
                os.close(lock)

    def remove(self) -> None:
        """Leaves the store like `close`: it vanishes now or, if somebody still uses it, when they leave."""
        self.close()


def _lock_shared(directory: Path) -> int | None:
    """Locks the directory; None if it has been removed meanwhile by the last one who used it.

    What it holds while nobody has it locked is of ranks that were killed, and would mislead ours.
    """
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        if _lock_exclusively(lock):
            _empty(lock)
        fcntl.flock(lock, fcntl.LOCK_SH)
        if os.path.samestat(os.fstat(lock), os.stat(directory)):
            return lock
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _lock_exclusively(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody else uses it, or the file system cannot say
        return False
    return True


def _is_of_a_store(name: str, directory: int) -> bool:
    with contextlib.suppress(OSError):
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        names = _FILE if stat.S_ISREG(mode) else _SOCKET if stat.S_ISSOCK(mode) else None
        return names is not None and names.fullmatch(name) is not None
    return False


def _empty(lock: int) -> None:
    """Removes what is of stores from a directory that is locked exclusively."""
    for name in os.listdir(lock):
        if _is_of_a_store(name, lock):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=lock)


def _remove(directory: Path, lock: int) -> None:
    """Empties the directory, and removes it if a store or a job has made it."""
    with contextlib.suppress(OSError):  # there may be something of somebody else in it, or it is gone
        _empty(lock)
        if _MADE in os.listdir(lock):
            os.unlink(_MADE, dir_fd=lock)
        elif not directory.name.startswith(job_directory_prefix()):
            return
        # Once only: as soon as it is gone, somebody else may make a new one under the same name.
        directory.rmdir()


def remove_abandoned(new: Path) -> None:
    """Removes this user's job directories beside `new` that nobody uses any more."""
    with contextlib.suppress(OSError):
        for path in new.parent.glob(job_directory_prefix() + "*"):
            if path != new:
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        found = os.fstat(lock)
        old = time.time() - found.st_mtime > _ABANDONED_SECONDS
        if old and found.st_uid == os.geteuid() and _lock_exclusively(lock):
            _remove(path, lock)
    finally:
        os.close(lock)
