"""Records and high-water marks from this host to the ledger.

Records are durable here before anything is permitted; shipping them is repetition until the ledger says that it
has them. The marks, signed by the node key, say how far each stream had grown: a record that vanishes between
here and the ledger leaves a mark that nothing fills.
"""

import threading
from collections.abc import Sequence
from pathlib import Path

from audit.marks import body
from audit.spool import ack, marks, unshipped
from interlock.errors import Refusal
from interlock.permit import boottime_ms
from runners.upstream import Upstream

LOOK_S = 0.25
MARK_EVERY_MS = 5_000


def ship_records(folder: Path, upstream: Upstream) -> int:
    """Send what `folder` holds beyond the last acknowledgement; returns how many records arrived.

    Raises the refusal of the control plane, or NotRecorded when the spool cannot be read.
    """
    sent = 0
    for shipment in unshipped(folder):
        reached = upstream.spool(shipment.stream, shipment.records)
        ack(folder, shipment.stream, reached)
        sent += max(0, reached - shipment.first)
    return sent


def mark_bytes(folders: Sequence[Path], boot_id: str) -> tuple[bytes, bytes]:
    """Return the body of the marks of all streams, and the same without its time (to see a change)."""
    found = [mark for folder in folders if folder.is_dir() for mark in marks(folder)]
    return body(found, boot_id, boottime_ms()), body(found, boot_id, 0)


def _look(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, time of change and size of every file of the streams: cheap, to see that nothing is new."""
    found = []
    for path in sorted(folder.glob("*/*")) if folder.is_dir() else ():
        try:
            info = path.lstat()
        except FileNotFoundError:
            continue
        found.append((str(path), info.st_mtime_ns, info.st_size))
    return found


class Shipper(threading.Thread):
    """Ships every quarter of a second while there is something, marks when a stream grew and each 5 s.

    `failed` is the last refusal, None while it goes well. The control plane being away is no fault here.
    """

    def __init__(self, folders: Sequence[Path], upstream: Upstream, boot_id: str) -> None:
        super().__init__(name="shipper", daemon=True)
        self._folders, self._upstream, self._boot_id = tuple(folders), upstream, boot_id
        self._end = threading.Event()
        self._marked, self._marked_ms = b"", 0
        self._seen: list[tuple[str, int, int]] = []
        self._full_ms = -MARK_EVERY_MS
        self.failed: Refusal | None = None

    def run(self) -> None:
        """Ship until `end`."""
        while not self._end.wait(LOOK_S):
            self.turn()

    def turn(self) -> None:
        """Ship once when a file changed, and each 5 s anyway; a refusal waits for the next turn."""
        look = [row for folder in self._folders for row in _look(folder)]
        if look == self._seen and self.failed is None and boottime_ms() - self._full_ms < MARK_EVERY_MS:
            return
        try:
            for folder in self._folders:
                while folder.is_dir() and ship_records(folder, self._upstream):
                    continue
            self._mark()
            self.failed = None
            self._seen, self._full_ms = look, boottime_ms()
        except Refusal as refusal:
            self.failed = refusal
            self._end.wait(1.0)

    def _mark(self) -> None:
        claimed, streams = mark_bytes(self._folders, self._boot_id)
        if streams == self._marked and boottime_ms() - self._marked_ms < MARK_EVERY_MS - LOOK_S * 1_000:
            return
        self._upstream.marks(claimed)
        self._marked, self._marked_ms = streams, boottime_ms()

    def end(self) -> None:
        """Stop, after one more turn for the closing records."""
        self._end.set()
        self.join()
        self._seen = []
        self.turn()
