"""What a run was shown, by content: the digest of each data set, told while the run works.

The digest is SHA-256 over one line a file, in order of path: path, size and the SHA-256 of its bytes, or where a link
leads to. It is taken once, beside the start of the run, from the host's own paths; a data set that somebody changes
afterwards has another digest at the next run, and nothing here notices it before. Page: docs/formats/record.md.
"""

import hashlib
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from interlock.errors import Refusal
from interlock.event import EventType
from interlock.order import LaunchOrder
from runners.dataset import within
from runners.station import Station

MAX_FILES, MAX_BYTES = 500_000, 256 << 30
_PIECE = 1 << 20


class _OverError(Exception):
    """The run is over, or the data set is too large: there is no digest."""


def tell(station: Station, order: LaunchOrder, over: threading.Event) -> None:
    """Record the digest of each data set of the plan; gives up when `over` is set. Raises nothing."""
    for dataset in order.plan.datasets:
        facts: dict[str, Any] = {"name": dataset.name, "path": dataset.path}
        try:
            facts.update(digest_of(within(dataset.path, station.roots), over))
        except (_OverError, OSError, Refusal) as failure:
            facts["digest"], facts["why"] = "", type(failure).__name__.strip("_")
        try:
            station.record(EventType.DATA_DIGESTED, order, facts)
        except Refusal as refusal:
            sys.stderr.write(f"data digest: {refusal}\n")
            return


def digest_of(root: Path, over: threading.Event) -> dict[str, Any]:
    """Return ``{digest, files, bytes}`` of a file or folder. Raises OSError, and _OverError beyond the limits."""
    whole, files, size = hashlib.sha256(), 0, 0
    for path in _paths(root):
        found = path.lstat()
        name = os.fsencode(path.relative_to(root)) if path != root else b""
        if stat.S_ISREG(found.st_mode):
            content, length = _content(path, over)
            whole.update(b"%d:%s file %d %s\n" % (len(name), name, length, content.encode()))
            files, size = files + 1, size + length
        elif stat.S_ISLNK(found.st_mode):
            target = os.fsencode(os.readlink(path))
            whole.update(b"%d:%s link %d:%s\n" % (len(name), name, len(target), target))
        if over.is_set() or files > MAX_FILES or size > MAX_BYTES:
            raise _OverError
    return {"digest": f"sha256:{whole.hexdigest()}", "files": files, "bytes": size}


def _paths(root: Path) -> Iterator[Path]:
    """Yield the files and links below `root`, or itself, in order of their path's bytes; no link is followed."""
    if not root.is_dir():
        yield root
        return
    found = [Path(top) / name for top, folders, names in os.walk(root)
             for name in (*names, *(f for f in folders if (Path(top) / f).is_symlink()))]
    yield from sorted(found, key=os.fsencode)


def _content(path: Path, over: threading.Event) -> tuple[str, int]:
    state, size = hashlib.sha256(), 0
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while piece := os.read(fd, _PIECE):
            state.update(piece)
            size += len(piece)
            if over.is_set() or size > MAX_BYTES:
                raise _OverError
    finally:
        os.close(fd)
    return state.hexdigest(), size
