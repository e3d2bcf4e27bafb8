"""The gateway's end of an engine's lines, for tests: a plain socket server. Standard library and frames only."""

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from runners.inference import frames


class Switchboard:
    """Takes an engine's connections at `path`; `hellos` are what they said first."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(64)
        self._idle: queue.Queue[socket.socket] = queue.Queue()
        self.hellos: list[dict[str, Any]] = []
        self._lines: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(2)
        self._listener.close()
        for line in self._lines:
            line.close()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            line.settimeout(30)
            hello = frames.receive(line)
            assert hello is not None
            self._lines.append(line)
            self.hellos.append(hello)
            self._idle.put(line)

    @contextmanager
    def line(self) -> Iterator[socket.socket]:
        """Lend an idle connection; one that was not closed meanwhile is idle again afterwards."""
        line = self._idle.get(timeout=30)
        yield line
        if line.fileno() >= 0:
            self._idle.put(line)

    def call(self, frame: dict[str, Any]) -> list[dict[str, Any]]:
        """Send one call and return every frame of its answer."""
        with self.line() as line:
            frames.send(line, frame)
            return list(answer(line))


def answer(line: socket.socket) -> Iterator[dict[str, Any]]:
    """Give the frames of one answer as they come."""
    while True:
        frame = frames.receive(line)
        assert frame is not None, "the engine hung up"
        yield frame
        if "delta" not in frame:
            return


def text(answered: list[dict[str, Any]]) -> str:
    """Return the text of an answer."""
    return "".join(frame.get("delta", "") for frame in answered)
