"""Datasets of a plan: host paths that may be bound read-only, and nothing else of the host.

A path must lie within one of the node's `data_roots`. Symlinks are resolved by us once, then the result is
opened component by component without following any, and the descriptor is what gets mounted: a swap
between look and use changes nothing.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from interlock.errors import Denied, Unavailable


def data_roots(paths: Sequence[str]) -> tuple[Path, ...]:
    """Return the resolved roots that `serve --data-root` named; raises Unavailable when one is no folder."""
    found = []
    for text in paths:
        root = Path(os.path.realpath(text))
        if not root.is_dir():
            raise Unavailable(f"the data root {text} is not a folder", code="data_root",
                              next_step="make it, or leave the option out")
        found.append(root)
    return tuple(found)


def within(path: str, roots: Sequence[Path]) -> Path:
    """Return the resolved path when it lies within a root; raises Denied (``denied.data_root``).

    An existing path outside and a missing one are refused alike: the answer says nothing about the host.
    """
    real = Path(os.path.realpath(path))
    if not any(real == root or root in real.parents for root in roots):
        raise Denied(
            f"{path} is outside the data roots of this node", code="data_root",
            next_step="put it below a data root, or start the node with --data-root",
        )
    return real


def open_beneath(real: Path) -> int:
    """Open a resolved path as an O_PATH descriptor, no component of it a symlink.

    The caller closes it. Raises Unavailable (``unavailable.dataset``) when it is gone, changed into a
    symlink, or neither a regular file nor a folder.
    """
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in real.parts[1:]:
            step = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = step
            if stat.S_ISLNK(os.fstat(fd).st_mode):
                raise OSError("a symlink")
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise OSError("neither a regular file nor a folder")
    except OSError as error:
        os.close(fd)
        raise Unavailable(f"the dataset {real} cannot be opened: {error}", code="dataset") from None
    return fd
