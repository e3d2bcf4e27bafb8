"""Small files that outlive a crash whole: the old content or the new one, the name or no name, never a half.

Both ways write a draft beside the file, fsync it, give it its name in one step and fsync the folder. What fails
leaves no draft behind; a draft that a crash leaves begins with a dot and counts for nothing.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path


def sync_folder(path: Path) -> None:
    """fsync a folder, so that names in it survive; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _draft(path: Path, data: bytes, mode: int) -> Path:
    """Return a durable file beside `path` that holds `data`; two writers at once never share one."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as out:
            os.fchmod(fd, mode)
            out.write(data)
            out.flush()
            os.fsync(fd)
    except OSError:
        _drop(draft)
        raise
    return draft


def _drop(draft: Path) -> None:
    with suppress(OSError):
        draft.unlink()


def write_new(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Make `path` with `data` if that name is free; raises OSError, FileExistsError when it is taken."""
    draft = _draft(path, data, mode)
    try:
        os.link(draft, path)
    finally:
        _drop(draft)
    sync_folder(path.parent)


def write_over(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Make `path` hold `data`, whatever was there; raises OSError and then leaves the old file."""
    draft = _draft(path, data, mode)
    try:
        os.replace(draft, path)
    except OSError:
        _drop(draft)
        raise
    sync_folder(path.parent)
