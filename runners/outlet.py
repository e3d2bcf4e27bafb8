"""Live output of a run: from its pipe to a file on this host to the control plane.

The file lies between, so that a control plane that is away neither blocks the run nor loses a byte, and a
node that restarts ships the rest. The plan's `output_mb` bounds the file; what is beyond is drained and
counted, never silently dropped.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from interlock.errors import Malformed

CHUNK = 256 * 1024


class Outlet(threading.Thread):
    """Reads `source` (a pipe; owned and closed here) into `path` until end-of-file or `limit` bytes.

    `truncated` counts the bytes beyond the limit. `grown` is set after each write.
    """

    def __init__(self, source: int, path: Path, limit: int, grown: threading.Event) -> None:
        super().__init__(name="outlet", daemon=True)
        self._source, self._path, self._limit, self._grown = source, path, limit, grown
        self.written, self.truncated = 0, 0
        self.failed = ""

    def run(self) -> None:
        """Copy until the last writer of the pipe is gone."""
        fd = -1
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self.failed = str(error.strerror)
        try:
            while data := os.read(self._source, 65536):
                self._keep(fd, data)
                self._grown.set()
        finally:
            if fd >= 0:
                os.close(fd)
            os.close(self._source)
            self._grown.set()

    def _keep(self, fd: int, data: bytes) -> None:
        room = 0 if self.failed else max(0, self._limit - self.written)
        try:
            kept = os.write(fd, data[:room]) if room else 0
        except OSError as error:
            # a full disk must not stall the run on a full pipe; the loss is counted and reported
            self.failed, kept = str(error.strerror), 0
        self.written += kept
        self.truncated += len(data) - kept


def ship(path: Path, offset: int, send: Callable[[int, bytes], int]) -> int:
    """Send what lies in `path` beyond `offset`; returns the offset that the receiver expects next.

    `send(offset, data)` returns the next offset; repeating the same offset is safe there. Raises its Refusal,
    or Malformed when it does not move on.
    """
    try:
        source = path.open("rb")
    except FileNotFoundError:
        return offset
    with source:
        while True:
            source.seek(offset)
            data = source.read(CHUNK)
            if not data:
                return offset
            reached = send(offset, data)
            if reached <= offset:
                raise Malformed("the receiver of the output makes no progress", code="answer")
            offset = reached
