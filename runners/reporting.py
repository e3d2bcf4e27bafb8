"""Committed checkpoints reported to the control plane: every manifest in the store, once, in any order.

The store belongs to the broker's user, and this runs as root: no symlink is followed, nothing but a small regular
file is read. What a manifest says is proven by its MAC at the control plane, not here.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from interlock.durable import write_over
from interlock.errors import NotRecorded, Refusal, Stale, Unavailable
from interlock.manifest import MAX_BYTES
from interlock.permit import boottime_ms
from runners.folders import Folders

AGAIN_MS = 60_000
_RUN = re.compile(r"[A-Za-z0-9_]{1,64}")
_STEP = re.compile(r"(\d{1,16})-([1-9]\d{0,4})")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Reports(Protocol):
    """The part of the node link that takes manifests (runners.upstream.Upstream)."""

    def checkpoint(self, run: str, attempt: int, manifest: bytes) -> str:
        """Report one manifest; repeating is safe."""


class Reporter:
    """A chore of the node. `STATE/node/reported/RUN.STEP-ATTEMPT` says what the control plane has taken."""

    def __init__(self, found: Folders, upstream: Reports) -> None:
        self._store, self._reported, self._upstream = found.store, found.node / "reported", upstream
        self._done: set[str] = set()
        self._again_ms: dict[str, int] = {}

    def turn(self) -> None:
        """Report what was not reported yet. One that is refused is asked again a minute later and blocks no other.

        Raises the first refusal, after the others had their turn; Unavailable ends the turn at once.
        """
        self._reported.mkdir(mode=0o700, exist_ok=True)
        first: Refusal | None = None
        for run, folder in list(_committed(self._store)):
            name = f"{run}.{folder}"
            if name in self._done or boottime_ms() < self._again_ms.get(name, 0):
                continue
            try:
                self._report(run, folder, name)
            except (Unavailable, Stale, NotRecorded):
                raise
            except Refusal as refusal:
                self._again_ms[name] = boottime_ms() + AGAIN_MS
                first = first or refusal
        if first is not None:
            raise first

    def _report(self, run: str, folder: str, name: str) -> None:
        mark = self._reported / name
        if not mark.exists():
            manifest = _read(self._store, run, folder)
            if manifest is None:
                return
            digest = self._upstream.checkpoint(run, int(folder.partition("-")[2]), manifest)
            write_over(mark, digest.encode(), 0o600)
        self._done.add(name)


def _names(folder: Path, pattern: re.Pattern[str]) -> list[str]:
    try:
        fd = os.open(folder, _FOLDER)
    except OSError:
        return []
    try:
        return sorted(n for n in os.listdir(fd) if pattern.fullmatch(n))
    finally:
        os.close(fd)


def _committed(store: Path) -> Iterator[tuple[str, str]]:
    for run in _names(store, _RUN):
        for folder in _names(store / run, _STEP):
            yield run, folder


def _read(store: Path, run: str, folder: str) -> bytes | None:
    """Return a manifest's bytes; None when there is no such regular file of a fitting size."""
    opened: list[int] = []
    try:
        opened.append(os.open(store, _FOLDER))
        for name in (run, folder):
            opened.append(os.open(name, _FOLDER, dir_fd=opened[-1]))
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        opened.append(os.open("manifest.json", flags, dir_fd=opened[-1]))
        info = os.fstat(opened[-1])
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_BYTES:
            return None
        return os.read(opened[-1], MAX_BYTES)
    except OSError:
        return None
    finally:
        for fd in opened:
            os.close(fd)
