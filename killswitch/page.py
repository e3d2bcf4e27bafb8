"""Two small pages that other processes of the host map: the stop page and each run's deadline page.

Stop page (4096 bytes, root-owned, 0444; docs/formats/stop-page.md), native byte order of the host:

    0  8s magic ILKSTOP1     8  u64 version 1      16  16s boot id      32  u64 sequence (odd: being written)
    40 u64 stop epoch        48 u64 written, ns of CLOCK_BOOTTIME       56  32s SHA-256 of the state file

Deadline page (4096 bytes, 0444): 0 8s magic ILKDEAD1, 8 u64 deadline in ns of CLOCK_BOOTTIME, 16 16s boot id.

Whoever reads must be able to close without the writer: a page that is older than 2 s, of another boot,
half-written, unreadable or without its state file counts as "everything is stopped".
"""

import hashlib
import itertools
import mmap
import os
import threading
import time
from pathlib import Path

from interlock.canon import canonical, parse
from interlock.durable import write_over
from interlock.errors import Refusal
from interlock.order import Labels, Mode, Scope, ScopeKind, StopOrder
from killswitch.state import StopState
from killswitch.store import boot_id

SIZE = 4096
STOP_MAGIC, DEADLINE_MAGIC = b"ILKSTOP1", b"ILKDEAD1"
VERSION = 1
STALE_NS = 2_000_000_000
_VERSION, _SEQ, _EPOCH, _WRITTEN = 1, 4, 5, 6  # indices of 8-byte words
_BOOT, _HASH = slice(16, 32), slice(56, 88)


def boottime_ns() -> int:
    """Return nanoseconds of CLOCK_BOOTTIME."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _make(path: Path) -> mmap.mmap:
    """Create or take over the page file; it is filled before it gets its name."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o444)
    try:
        os.fchmod(fd, 0o444)
        os.posix_fallocate(fd, 0, SIZE)
        page = mmap.mmap(fd, SIZE)
    finally:
        os.close(fd)
    os.rename(draft, path)
    return page


class StopPageWriter:
    """The supervisor's end. Call `write` every 250 ms and at each change, under the supervisor's lock."""

    def __init__(self, page_path: Path, state_path: Path) -> None:
        self._state_path = state_path
        self._page = _make(page_path)
        self._words = memoryview(self._page).cast("Q")
        self._page[0:8] = STOP_MAGIC
        self._words[_VERSION] = VERSION
        self._page[_BOOT] = bytes.fromhex(boot_id())
        self._last: bytes = b""

    def write(self, state: StopState) -> None:
        """Publish `state`. The state file is replaced first, and only when it changed; where that fails the
        page says so by its age, and every reader closes."""
        data = canonical({"epoch": state.epoch, "stops": [s.as_json() for s in state.stops.values()]})
        if data != self._last:
            try:
                write_over(self._state_path, data, 0o444)
            except OSError:
                self._words[_WRITTEN] = 0
                return
            self._last = data
        self._words[_SEQ] += 1
        self._words[_EPOCH] = state.epoch
        self._words[_WRITTEN] = boottime_ns()
        self._page[_HASH] = hashlib.sha256(data).digest()
        self._words[_SEQ] += 1


class StopPage:
    """The readers' end, for any uid; thread-safe. One object for each process that asks."""

    def __init__(self, page_path: Path, state_path: Path) -> None:
        self._page_path, self._state_path = Path(page_path), Path(state_path)
        self._boot = bytes.fromhex(boot_id())
        self._lock = threading.Lock()
        self._page: mmap.mmap | None = None
        self._inode = 0
        self._hash, self._stops = b"", ()  # type: tuple[bytes, tuple[StopOrder, ...]]
        self._never = itertools.count(1)

    def stopped(self, labels: Labels) -> StopOrder | None:
        """Return an active stop that covers `labels`, or None.

        When the page cannot be trusted, a synthetic stop of everything with the id ``stale``.
        """
        with self._lock:
            stops = self._read()[1]
        if stops is None:
            return _stale()
        return next((s for s in stops if s.scope.matches(labels)), None)

    def epoch(self) -> int:
        """Return the stop epoch for permits; a page that cannot be trusted gives a number that no permit has."""
        with self._lock:
            epoch, stops = self._read()
        return epoch if stops is not None else -next(self._never)

    def _read(self) -> tuple[int, tuple[StopOrder, ...] | None]:
        """Return (epoch, stops); stops is None when the page is stale in any way."""
        for pause in (0.0, 0.001, 0.005, 0.02, 0.05):
            time.sleep(pause)
            found = self._look()
            if found is not None:
                return found
            self._page = None
        return 0, None

    def _look(self) -> tuple[int, tuple[StopOrder, ...]] | None:
        try:
            raw = self._snapshot()
            if raw is None:
                return None
            words = memoryview(raw).cast("Q")
            if raw[0:8] != STOP_MAGIC or words[_VERSION] != VERSION or raw[_BOOT] != self._boot:
                return None
            if boottime_ns() - words[_WRITTEN] > STALE_NS:
                return None
            if raw[_HASH] != self._hash:
                self._take(raw[_HASH])
            return int(words[_EPOCH]), self._stops
        except (OSError, ValueError, Refusal, KeyError, TypeError):
            return None

    def _snapshot(self) -> bytes | None:
        """Return the page between two equal, even sequence numbers, or None."""
        if self._page is None:
            fd = os.open(self._page_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._page = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
        words = memoryview(self._page).cast("Q")
        try:
            before = words[_SEQ]
            raw = self._page[:]
            return raw if before % 2 == 0 and words[_SEQ] == before else None
        finally:
            words.release()

    def _take(self, wanted: bytes) -> None:
        data = self._state_path.read_bytes()
        if hashlib.sha256(data).digest() != wanted:
            raise ValueError("the state file does not belong to the page")
        stops = tuple(StopOrder.from_json(s) for s in parse(data, limit=16 << 20)["stops"])
        self._hash, self._stops = wanted, stops


def _stale() -> StopOrder:
    return StopOrder(
        "stale", Scope(ScopeKind.EVERYTHING), Mode.KILL, 0, "stop-page", "the stop state of this host is stale"
    )


class DeadlineWriter:
    """One run's deadline page; the supervisor alone writes. A store of 8 aligned bytes is one store."""

    def __init__(self, path: Path, deadline_ms: int) -> None:
        self.path = path
        self._page = _make(path)
        self._words = memoryview(self._page).cast("Q")
        self.set(deadline_ms)
        self._page[16:32] = bytes.fromhex(boot_id())
        self._page[0:8] = DEADLINE_MAGIC

    def set(self, deadline_ms: int) -> None:
        """Move the deadline (ms of CLOCK_BOOTTIME); 0 ends the run at the next look of any watcher."""
        self._words[1] = deadline_ms * 1_000_000

    def remove(self) -> None:
        """Take the page away and let go of it (a map keeps a descriptor); the run must be gone."""
        self.path.unlink(missing_ok=True)
        self._words.release()
        self._page.close()


def read_deadline_ms(path: Path) -> int:
    """Return the deadline in ms of CLOCK_BOOTTIME; 0 (passed) for another boot or a page that is off.

    Raises FileNotFoundError when there is no page.
    """
    raw = path.read_bytes()[:SIZE]
    if len(raw) != SIZE or raw[0:8] != DEADLINE_MAGIC or raw[16:32] != bytes.fromhex(boot_id()):
        return 0
    return int(memoryview(raw).cast("Q")[1]) // 1_000_000
