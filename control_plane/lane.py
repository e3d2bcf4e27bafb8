"""Threads that nothing else may fill: one for each place that keeps a stop, and a few for those who give it.

A place that does not answer is waited for once; while it is behind, nobody waits for it again. The work itself is
never dropped: it is done as soon as the place answers.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_STOPS = ThreadPoolExecutor(8, thread_name_prefix="stop")  # the common pool may be full of work that waits


async def aside(act: Callable[[], T]) -> T:
    """Do what a stop needs in a thread kept for stops; raises what `act` raises."""
    return await asyncio.get_running_loop().run_in_executor(_STOPS, act)


class Lane:
    """One thread and how long to wait for it. `_behind` is True from a job that took too long to one that ended."""

    def __init__(self, name: str, patience_s: float) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._patience_s, self._behind = patience_s, False

    def do(self, job: Callable[[], T]) -> T:
        """Do `job` and return its result. Raises TimeoutError (it will be done later) or what the job raises;
        RuntimeError once the lane is closed."""
        waiting: Future[T] = self._thread.submit(self._run, job)
        try:
            return waiting.result(0 if self._behind else self._patience_s)
        except TimeoutError:
            self._behind = not waiting.done()
            raise

    def _run(self, job: Callable[[], T]) -> T:
        done = job()
        self._behind = False
        return done

    def close(self) -> None:
        """End the thread; what waits is left to the next start."""
        self._thread.shutdown(wait=False, cancel_futures=True)
