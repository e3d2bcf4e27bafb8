"""One bell for all long polls: whoever changes something rings, whoever waits looks again.

Ringing works from any thread and never blocks; waiting is for coroutines, so that a long poll holds no
thread (a pool full of waiting polls must not delay a stop).
"""

import asyncio
import threading


class Bell:
    """A counter and its listeners. `_lock` guards both; a listener is a future of its own event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def count(self) -> int:
        """Return how often it rang; read it BEFORE looking at what you wait for."""
        return self._count

    def ring(self) -> None:
        """Wake all listeners."""
        with self._lock:
            self._count += 1
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            try:
                future.get_loop().call_soon_threadsafe(_finish, future)
            except RuntimeError:
                continue  # that loop has ended, and its listeners with it

    async def heard(self, count: int, timeout_s: float) -> bool:
        """Wait until the bell rang after `count` was read, at most `timeout_s`; return whether it did."""
        with self._lock:
            if self._count != count:
                return True
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
        try:
            await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return False
        finally:
            with self._lock:
                self._waiting.discard(future)
        return True


def _finish(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
