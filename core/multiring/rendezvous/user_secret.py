"""A secret that all processes of a user know and nobody else: a file in the home directory.

As ~/.Xauthority is. On a cluster all hosts see the same home. So ranks that a foreign launcher has started
can prove to each other that they belong to the same user's job, without being told a secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path

from multiring.errors import UsageError

__all__ = ["OTHER_USER_SECRET", "job_secret"]

# Why two processes of a job may have different secrets.
OTHER_USER_SECRET = (
    "this host does not see the same ~/.config/multiring/secret as the host of rank 0, or another job has "
    "the port: set MULTIRING_STORE and MULTIRING_SECRET, both the same on all ranks (docs/clusters.md)"
)

_BYTES = 32
# Where it cannot be made at once, one that is incomplete is being written; a network file system may show it
# so for some seconds.
_PATIENCE = 10.0


def job_secret(job: str) -> bytes:
    """The secret of a job: the same for all processes of this user, another for every job.

    Raises:
        UsageError: There is no home directory to keep the user's secret in, or others may read it there.
    """
    try:
        path = Path.home() / ".config/multiring/secret"
        try:
            found = _read(path)
        except FileNotFoundError:
            _make(path)
            found = _read(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"this user's secret, which keeps other users out of the jobs, cannot be kept: {error}; "
            "set MULTIRING_SECRET to 32 or more hexadecimal digits, the same on all ranks (docs/clusters.md)"
        ) from error
    return hmac.new(found, job.encode(), hashlib.sha256).digest()


def _read(path: Path) -> bytes:
    until = time.monotonic() + _PATIENCE
    while True:
        with open(path) as file:  # anew each time, or a network file system need not look
            about = os.fstat(file.fileno())
            if about.st_uid != os.geteuid() or about.st_mode & 0o077:
                raise ValueError(f"others may read {path}, or it is theirs: remove it")
            text = file.read()
        if len(text) >= 2 * _BYTES:
            return bytes.fromhex(text)
        if time.monotonic() > until:
            raise ValueError(f"{path} is incomplete: remove it")
        time.sleep(0.02)


def _make(path: Path) -> None:
    """Makes the file, unless another process is quicker: it is there whole or not at all.

    Where the file system has no hard links, it is there empty for an instant before it is whole. Only the
    process that has made it writes it and may take it away again, so that all have the same secret, or none.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"secret.{os.getpid()}.{secrets.token_hex(8)}")
    _write_new(draft)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError:  # PermissionError or one of many others
        with contextlib.suppress(FileExistsError):
            _write_new(path)
    finally:
        draft.unlink()


def _write_new(path: Path) -> None:
    """Makes a file that is not there, or FileExistsError, with a new secret, or none at all."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        text = secrets.token_hex(_BYTES).encode()
        try:
            if os.write(descriptor, text) < len(text):
                raise OSError(f"there is no space left for {path}")
        finally:
            os.close(descriptor)  # on network file systems the time when it may turn out that it is full
    except BaseException:
        path.unlink()
        raise
