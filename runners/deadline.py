"""The third watcher: kills a run whose deadline has passed although supervisor and run init cannot [G18].

A frozen run init does not count and a hung supervisor does not either; the node is then the only one left.
So it reads the deadline pages with its own few lines and kills by its own primitive: thaw, then SIGKILL of
run init by its pidfd, which ends the pid namespace.
"""

import os
import select
import signal
import struct
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

from interlock.permit import boottime_ms

MAGIC = b"ILKDEAD1"
LOOK_S = 0.1
_PAGE = struct.Struct("<8sQ16s")


def _boot_id() -> bytes:
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def passed(page: Path, *, now_ms: int | None = None) -> bool:
    """Return whether the deadline in `page` has passed.

    A page that is gone, short, of another boot or without the magic counts as passed: nothing lives on an
    unreadable lease. Clock: CLOCK_BOOTTIME.
    """
    try:
        magic, deadline_ns, boot = _PAGE.unpack(page.read_bytes()[: _PAGE.size])
        known = magic == MAGIC and boot == _boot_id()
    except (OSError, struct.error, ValueError):
        return True
    now = boottime_ms() if now_ms is None else now_ms
    return not known or now * 1_000_000 >= deadline_ns


class Watched:
    """One live run: its page, its way to thaw, the pidfd of its run init (closed by `Watcher.forget`)."""

    def __init__(self, page: Path, thaw: Callable[[], None], init_pidfd: int) -> None:
        self.page, self._thaw, self._pidfd = page, thaw, init_pidfd
        self.killed = False

    def look(self) -> None:
        """Kill when the deadline has passed; again at each look until run init is gone."""
        if not passed(self.page) or self._gone():
            return
        self.killed = True
        try:
            self._thaw()
        except OSError:
            pass  # the group may be gone already; the signal tells
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _gone(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self._pidfd)


class Watcher(threading.Thread):
    """Looks at every run each 100 ms. Owns the pidfds it was given."""

    def __init__(self) -> None:
        super().__init__(name="watcher", daemon=True)
        self._runs: dict[tuple[str, int], Watched] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()

    def watch(self, run: str, attempt: int, watched: Watched) -> None:
        """Begin to watch."""
        with self._lock:
            self._runs[run, attempt] = watched

    def forget(self, run: str, attempt: int) -> bool:
        """Stop watching; returns whether this watcher killed the run."""
        with self._lock:
            found = self._runs.pop((run, attempt), None)
            if found is None:
                return False
            found.close()
            return found.killed

    def run(self) -> None:
        """Look until `end`."""
        while not self._end.wait(LOOK_S):
            with self._lock:
                for watched in self._runs.values():
                    watched.look()

    def end(self) -> None:
        """Stop looking and close every pidfd."""
        self._end.set()
        self.join()
        with self._lock:
            for watched in self._runs.values():
                watched.close()
            self._runs.clear()
