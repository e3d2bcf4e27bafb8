"""Host uids of runs: one belongs to one live run, and is handed out again only after that run is dead.

The pool's state is in memory; what lives on the host is asked each time, so a restarted program cannot give
out a uid that a survivor still has.
"""

import os
import re
import secrets
import threading
from pathlib import Path

from interlock.errors import Conflict, LayerMissing

FIRST, LAST = 60_100, 60_999
_DYNAMIC = (61_184, 65_519)  # systemd's dynamic users, by its documentation
_LOWEST = 60_000
# Asked twice a start of every process there is, so it is read raw. A name cannot fake a row: the kernel writes its
# line breaks as \n, and it comes first.
_STATUS = re.compile(rb"^State:\t(\S).*?^Uid:\t([0-9\t]+)$", re.MULTILINE | re.DOTALL)


def _accounts(passwd: Path) -> list[int]:
    rows = passwd.read_text(errors="replace").splitlines() if passwd.exists() else []
    return [int(f[2]) for f in (r.split(":") for r in rows) if len(f) > 3 and f[2].isdigit()]


def _subordinate(subuid: Path) -> list[tuple[int, int]]:
    rows = subuid.read_text(errors="replace").splitlines() if subuid.exists() else []
    fields = [r.split(":") for r in rows]
    found = [(int(f[1]), int(f[2])) for f in fields if len(f) == 3 and f[1].isdigit() and f[2].isdigit()]
    return [(start, start + count - 1) for start, count in found if count]


def check_range(
    first: int, last: int, *, passwd: Path = Path("/etc/passwd"), subuid: Path = Path("/etc/subuid")
) -> None:
    """Refuse a range of uids that somebody else may own.

    Raises LayerMissing (``layer_missing.uid``) when it is empty, below 60000, or meets an account, a range of
    subordinate uids or systemd's dynamic users.
    """
    taken = [(u, u) for u in _accounts(passwd)] + _subordinate(subuid) + [_DYNAMIC]
    meets = [f"{a}-{b}" if a != b else str(a) for a, b in taken if a <= last and first <= b]
    if first > last or first < _LOWEST or meets:
        raise LayerMissing(
            f"uids {first}-{last} cannot be those of runs" + (f": {meets[0]} is taken" if meets else ""),
            code="uid", next_step="set a free range from 60000 up that no account uses",
        )


def in_use(proc: Path = Path("/proc")) -> frozenset[int]:
    """Return the uids (real, effective, saved, file system) of all living processes of this host."""
    found: set[int] = set()
    for entry in os.listdir(proc):
        if entry.isdigit():
            try:
                with open(f"{proc}/{entry}/status", "rb", buffering=0) as file:
                    rows = _STATUS.search(file.read(4096))
            except OSError:  # it ended while we looked
                continue
            if rows and rows[1] not in b"ZX":  # a zombie only waits to be collected
                found.update(int(u) for u in rows[2].split())
    return frozenset(found)


class Pool:
    """Hands out uids; thread-safe. `first` and `last` are inclusive and checked once, here."""

    def __init__(self, first: int = FIRST, last: int = LAST) -> None:
        check_range(first, last)
        self._range = range(first, last + 1)
        self._held: set[int] = set()
        self._next = secrets.randbelow(len(self._range))  # two pools on one host seldom look at the same uid
        self._lock = threading.Lock()

    def take(self) -> int:
        """Return a uid that no run and no process has; raises Conflict (``conflict.uid``) when none is left.

        Goes round the range from a random place, so that a uid just given back is used last.
        """
        with self._lock:
            busy = in_use() | self._held
            for step in range(len(self._range)):
                uid = self._range[(self._next + step) % len(self._range)]
                if uid not in busy:
                    self._next = (self._next + step + 1) % len(self._range)
                    self._held.add(uid)
                    return uid
        raise Conflict("no uid is free for a run", code="uid", next_step="wait for a run to end")

    def release(self, uid: int) -> None:
        """Give a uid back; only after its run is CONFIRMED dead. A process that still has it keeps it out."""
        with self._lock:
            self._held.discard(uid)
