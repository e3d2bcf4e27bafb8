"""What leaves a run besides its output: the regular files of `/work/out`, named by their digests.

Called after the supervisor has confirmed that nothing of the run lives, so nothing moves underneath. The
tree was made by the run all the same: no symlink is followed, no device, pipe or socket is opened, nothing
outside the run's own file system is read, and a byte budget holds.
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from interlock.canon import digest_bytes

FILES = 1000
_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$")


@dataclass(frozen=True)
class Collected:
    """One file that leaves."""

    name: str
    data: bytes
    digest: str


@dataclass(frozen=True)
class Harvest:
    """`files` leave; `skipped` maps a printable name to the reason why it stays."""

    files: tuple[Collected, ...]
    skipped: tuple[tuple[str, str], ...]


def collect(work: Path, limit: int) -> Harvest:
    """Read the regular files directly in `work`/out, at most `limit` bytes in all, in order of name.

    Returns an empty harvest when the run made no such folder. Raises nothing for what the run did: it is
    in `skipped`.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        top = os.open(work, flags)
    except OSError:
        return Harvest((), ())
    try:
        out = os.open("out", flags, dir_fd=top)
    except OSError:
        return Harvest((), ())
    finally:
        os.close(top)
    try:
        return _read_all(out, limit)
    finally:
        os.close(out)


def _read_all(out: int, limit: int) -> Harvest:
    device = os.fstat(out).st_dev
    files: list[Collected] = []
    skipped: list[tuple[str, str]] = []
    left = limit
    for name in sorted(os.listdir(out)):
        if len(files) + len(skipped) >= FILES:
            skipped.append(("...", f"more than {FILES} names"))
            break
        found = _read_one(out, name, device, left)
        if isinstance(found, str):
            skipped.append((name.encode("ascii", "backslashreplace").decode()[:100], found))
        else:
            files.append(Collected(name, found, digest_bytes(found)))
            left -= len(found)
    return Harvest(tuple(files), tuple(skipped))


def _read_one(out: int, name: str, device: int, left: int) -> bytes | str:
    """Return the bytes, or the reason why the name is skipped."""
    if not _NAME.match(name):
        return "its name is not made of letters, digits, '.', '_' and '-'"
    try:
        # O_NONBLOCK: a pipe without a writer must not hold us; O_NOFOLLOW: a link is not opened
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=out)
    except OSError as error:
        return f"not a regular file ({error.strerror})"
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return "not a regular file"
        if info.st_dev != device:
            return "on another file system"
        if info.st_size > left:
            return "over the byte budget of the plan"
        return _read_up_to(fd, info.st_size)
    finally:
        os.close(fd)


def _read_up_to(fd: int, size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.read(fd, min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
