"""Brings what an attempt produced to the control plane: states in their order, live output, files, the end.

Everything lies in the attempt's folder (`STATE/node/work/RUN.ATTEMPT`) until it has arrived: `output.log`,
`files/`, and `final.json`, the body of the last state report, written when the attempt is over. A control plane
that is away costs patience, a node program that restarts takes up the folders that it finds.
"""

import json
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from interlock.canon import canonical
from interlock.durable import sync_folder, write_over
from interlock.errors import Conflict, NotRecorded, Refusal, Stale, TooMany, Unavailable
from runners.outlet import ship
from runners.upstream import Upstream

LATER = (Unavailable, TooMany, Stale, NotRecorded)
BEAT_S = 0.5
PAUSE_S = 1.0
OUTPUT, FILES, FINAL = "output.log", "files", "final.json"


class Courier(threading.Thread):
    """One attempt's deliveries. `grown` wakes it; `complain` hears of what the control plane will never take.

    `_states` holds reports that wait, guarded by `_lock`.
    """

    def __init__(
        self, folder: Path, run: str, attempt: int, upstream: Upstream, complain: Callable[[Refusal], None]
    ) -> None:
        super().__init__(name=f"courier-{run}.{attempt}", daemon=True)
        self.folder, self._run, self._attempt = folder, run, attempt
        self._upstream, self._complain = upstream, complain
        self.grown = threading.Event()
        self.delivered = threading.Event()
        self._lock = threading.Lock()
        self._states: list[dict[str, Any]] = []
        self._offset, self._lost_output = 0, False
        self._final: dict[str, Any] | None = None
        self._end = threading.Event()

    def tell(self, body: dict[str, Any]) -> None:
        """Report a state soon, after those before it."""
        with self._lock:
            self._states.append(body)
        self.grown.set()

    def finish(self, final: dict[str, Any]) -> None:
        """Keep the last report durably; the folder goes when all of it has arrived. On a full disk it is kept in
        memory: should this program die first, the next one says that the attempt ended with its node."""
        try:
            write_over(self.folder / FINAL, canonical(final), 0o600)
        except OSError:
            self._final = final
        self.grown.set()

    def end(self) -> None:
        """Stop without waiting for the rest: it lies in the folder."""
        self._end.set()
        self.grown.set()

    def run(self) -> None:
        """Deliver until all has arrived or `end`."""
        while not self._end.is_set():
            self.grown.wait(BEAT_S)
            self.grown.clear()
            # looked at first: what is there now belongs to it
            over = self._final is not None or (self.folder / FINAL).exists()
            if self._try() and over:
                self._try_last()
            if self.delivered.is_set():
                return

    def _try(self) -> bool:
        """Send waiting states and new output; returns whether nothing is left."""
        while self._states:
            if not self._sent(lambda: self._upstream.state(self._run, self._attempt, self._states[0])):
                return False
            with self._lock:
                self._states.pop(0)
        return self._lost_output or self._sent(self._ship_output)

    def _ship_output(self) -> None:
        try:
            ship(self.folder / OUTPUT, self._offset, self._send_output)
        except LATER:
            raise
        except Conflict as gap:
            # it has less than we sent before (a restored disk): go back to where it is
            expected = gap.details.get("next")
            if not isinstance(expected, int) or not 0 <= expected < self._offset:
                self._lost_output = True
                raise
            self._offset = expected
            raise Unavailable("the output is sent again", code="output") from None
        except Refusal:
            self._lost_output = True  # it will never be taken: say so once, go on with the end
            raise

    def _send_output(self, offset: int, data: bytes) -> int:
        self._offset = self._upstream.output(self._run, self._attempt, offset, data)
        return self._offset

    def _send_file(self, path: Path) -> None:
        self._upstream.file(self._run, self._attempt, path.name, path.read_bytes())

    def _try_last(self) -> None:
        files = self.folder / FILES
        for path in sorted(files.iterdir()) if files.is_dir() else ():
            if not self._sent(partial(self._send_file, path)):
                return
            path.unlink()
        final = self._final or json.loads((self.folder / FINAL).read_bytes())
        if self._sent(lambda: self._upstream.state(self._run, self._attempt, final)):
            remove(self.folder)
            self.delivered.set()

    def _sent(self, send: Callable[[], None]) -> bool:
        """Return whether it arrived or never will; False means later."""
        try:
            send()
        except LATER:
            self._end.wait(PAUSE_S)
            return False
        except Refusal as refusal:
            self._complain(refusal)
        return True


def begin(work: Path, run: str, attempt: int) -> Path:
    """Make and return the folder of an attempt; it must not exist."""
    folder = work / f"{run}.{attempt}"
    folder.mkdir(mode=0o700)
    sync_folder(work)
    return folder


def remove(folder: Path) -> None:
    """Take away the folder of a delivered attempt."""
    shutil.rmtree(folder)
    sync_folder(folder.parent)


def left_behind(work: Path) -> list[tuple[Path, str, int]]:
    """Return (folder, run, attempt) of what an earlier node program did not deliver."""
    found = []
    for path in sorted(work.iterdir()):
        run, _, attempt = path.name.rpartition(".")
        if path.is_dir() and run and attempt.isdigit():
            found.append((path, run, int(attempt)))
    return found
