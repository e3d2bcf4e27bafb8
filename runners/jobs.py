"""Two threads that read large files, so that the broker's loop never does.

Jobs of one run wait for those of others: a free thread takes the first job of whoever has the fewest at work.
"""

import os
import queue
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from interlock.errors import Refusal, Unavailable

M = TypeVar("M")
T = TypeVar("T")
THREADS = 2


@dataclass(frozen=True)
class Job(Generic[M, T]):
    """What to do for `owner`; `mark` comes back with the result."""

    owner: object
    mark: M
    work: Callable[[], T]


@dataclass(frozen=True)
class Done(Generic[M, T]):
    """The end of a job: a result or a refusal."""

    mark: M
    result: T | None
    refusal: Refusal | None


class Jobs(Generic[M, T]):
    """`fd` is readable while something is done. `_news` guards what waits and who is at work."""

    def __init__(self, threads: int = THREADS) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._news = threading.Condition()
        self._waiting: list[Job[M, T]] = []
        self._at_work: Counter[object] = Counter()
        self._done: queue.SimpleQueue[Done[M, T]] = queue.SimpleQueue()
        self._ended = False
        self._threads = [threading.Thread(target=self._run, name=f"files-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def begin(self, job: Job[M, T]) -> None:
        """Queue a job; any thread."""
        with self._news:
            self._waiting.append(job)
            self._news.notify()

    def done(self) -> list[Done[M, T]]:
        """Return what has ended since the last call."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        found = []
        while not self._done.empty():
            found.append(self._done.get_nowait())
        return found

    def close(self, wait_s: float = 2.0) -> None:
        """Begin no further job and wait a moment for those at work; what is cut leaves only a staging folder."""
        with self._news:
            self._ended = True
            self._waiting.clear()
            self._news.notify_all()
        for thread in self._threads:
            thread.join(wait_s)
        if not any(t.is_alive() for t in self._threads):
            os.close(self.fd)

    def _next(self) -> Job[M, T] | None:
        with self._news:
            while not self._waiting and not self._ended:
                self._news.wait()
            if self._ended:
                return None
            job = min(self._waiting, key=lambda j: self._at_work[j.owner])
            self._waiting.remove(job)
            self._at_work[job.owner] += 1
            return job

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._done.put(_carry_out(job))
            with self._news:
                self._at_work[job.owner] -= 1
                self._at_work += Counter()  # drop those at zero
            os.eventfd_write(self.fd, 1)


def _carry_out(job: Job[M, T]) -> Done[M, T]:
    try:
        return Done(job.mark, job.work(), None)
    except Refusal as refusal:
        return Done(job.mark, None, refusal)
    except OSError as error:
        return Done(job.mark, None, disk_fails(error))
    except Exception:  # a fault of ours must answer the guest and leave the thread alive
        traceback.print_exc()
        return Done(job.mark, None, Unavailable("the broker failed", code="broker", next_step="see the node's log"))


def disk_fails(error: OSError) -> Unavailable:
    """Return the refusal for a disk that takes or gives nothing."""
    return Unavailable(f"the node's disk does not do it: {error.strerror}", code="disk",
                       next_step="look at the node's state disk")
