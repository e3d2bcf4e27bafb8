"""Datasets of a plan: host paths that may be bound read-only, and nothing else of the host.

A path must lie within one of the node's `data_roots`. Symlinks are resolved here once; sandbox/enter.py then
opens the resolved path without following any and mounts that descriptor, so a swap in between is refused.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from interlock.errors import Denied, NotFound, Unavailable


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

    An existing path outside and a missing one are refused alike: the answer says nothing about the host. Within
    a root a missing one is NotFound (``not_found.data``).
    """
    real = Path(os.path.realpath(path))
    if not any(real == root or root in real.parents for root in roots):
        raise Denied(
            f"{path} is outside the data roots of this node", code="data_root",
            next_step="put it below a data root, or start the node with --data-root",
        )
    if not real.exists():
        raise NotFound(f"{path} is not on this node", code="data",
                       next_step="name a file or folder that lies below a data root")
    return real
