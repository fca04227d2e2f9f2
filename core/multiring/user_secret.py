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
from pathlib import Path

from multiring.errors import UsageError

__all__ = ["job_secret"]

_BYTES = 32


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
            f"this user's secret, which keeps strangers out of his jobs, cannot be kept: {error}; "
            "set MULTIRING_SECRET to 32 or more hexadecimal digits, the same on all ranks (docs/clusters.md)"
        ) from error
    return hmac.new(found, job.encode(), hashlib.sha256).digest()


def _read(path: Path) -> bytes:
    with open(path) as file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.geteuid() or about.st_mode & 0o077:
            raise ValueError(f"others may read {path}, or it is theirs: remove it")
        found = bytes.fromhex(file.read())
    if len(found) < _BYTES:
        raise ValueError(f"{path} is incomplete: remove it")
    return found


def _make(path: Path) -> None:
    """Makes the file, unless another process is quicker: it is there whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"secret.{os.getpid()}.{secrets.token_hex(8)}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(_BYTES))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
