"""Accepts the connections of one engine, and never faster than a bound: an engine that dials without end waits.

An engine's socket is in the hands of code that we do not trust, and everybody's calls share our event loop. So
connections are taken one by one, `BURST` at once and `PER_S` afterwards; more of them wait where the kernel keeps them.
"""

import asyncio
import socket
from collections.abc import Callable

BURST, PER_S = 64, 50


class Dialled:
    """One listening socket, taken over. `made` makes the protocol of a connection."""

    def __init__(self, listener: socket.socket, made: Callable[[], asyncio.Protocol]) -> None:
        self._listener, self._made = listener, made
        self._loop = asyncio.get_running_loop()
        self._left, self._at = float(BURST), self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        now = self._loop.time()
        self._left = min(BURST, self._left + (now - self._at) * PER_S)
        self._at = now
        if self._left < 1:
            self._loop.remove_reader(self._listener.fileno())
            self._timer = self._loop.call_later(1 / PER_S, self._again)
            return
        try:
            line, _ = self._listener.accept()
        except OSError:  # it hung up again, or there are no descriptors left: the next one may do better
            self._left -= 1
            return
        self._left -= 1
        line.setblocking(False)
        task: asyncio.Task[object] = self._loop.create_task(self._loop.connect_accepted_socket(self._made, line))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _again(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Listen no more; connections stay."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
